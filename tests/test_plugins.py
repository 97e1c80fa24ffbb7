from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollfeed.errors import PluginError
from rollfeed.plugins import check_fits, load_factory, load_plugin
from rollfeed.protocols import GenerateFn, GroupFilter, PromptSource, RewardFn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_functions.py").write_text(
        "value = 3\n"
        "def reward(sample, prompt): return 1.0\n"
        "def too_few(sample): return 1.0\n"
        "def too_many(sample, prompt, extra): return 1.0\n"
        "def not_async(request, *, services): return []\n"
        "class Holder:\n"
        "    @staticmethod\n"
        "    def reward(sample, prompt): return 2.0\n"
        "def raising(): raise RuntimeError('no data')\n"
        "def no_source(): return object()\n"
    )
    (tmp_path / "broken_module.py").write_text("import does_not_exist_anywhere\n")
    (tmp_path / "raising_module.py").write_text("raise ValueError('at import')\n")
    return tmp_path


def test_a_fitting_function_is_returned(folder: Path) -> None:
    function = load_plugin("my_functions:reward", RewardFn, key="plugins.reward", folders=[folder])
    assert function(None, None) == 1.0


def test_a_dotted_name_reaches_into_a_class(folder: Path) -> None:
    function = load_plugin("my_functions:Holder.reward", RewardFn, key="plugins.reward", folders=[folder])
    assert function(None, None) == 2.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_functions.reward", "write it as module:name"),
        ("no_such_module:reward", "no module 'no_such_module'"),
        ("my_functions:rewards", "has no 'rewards'; it has .*reward"),
        ("my_functions:value", "is a int, not callable; it must fit RewardFn"),
        (
            "my_functions:too_few",
            r"does not fit RewardFn: too many positional arguments; it is called with \(sample, prompt\)",
        ),
        ("my_functions:too_many", "does not fit RewardFn: missing a required argument: 'extra'"),
        ("broken_module:f", "importing it failed: No module named 'does_not_exist_anywhere'"),
        ("raising_module:f", "importing it failed: ValueError: at import"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_in_one_line(folder: Path, path: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        load_plugin(path, RewardFn, key="plugins.reward", folders=[folder])
    assert str(caught.value).startswith(f"plugins.reward = {path!r}: ")
    assert "\n" not in str(caught.value)


def test_a_function_that_must_be_async_is_refused_when_it_is_not(folder: Path) -> None:
    with pytest.raises(PluginError, match="must be async"):
        load_plugin("my_functions:not_async", GenerateFn, key="plugins.generate", folders=[folder])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_functions:raising", "calling it failed: RuntimeError: no data"),
        ("my_functions:no_source", "object has no method 'draw'"),
        ("my_functions:reward", "missing a required argument: 'sample'; it is called with nothing"),
        ("my_functions:value", "must be a function or class that makes a PromptSource"),
    ],
)
def test_a_factory_that_does_not_make_the_object_is_refused(folder: Path, path: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_factory(path, PromptSource, key="plugins.prompt_source", folders=[folder])


def test_partials_and_callable_objects_fit() -> None:
    def decide(samples: Any, *, limit: int) -> Any:
        return limit

    class Decider:
        def __call__(self, samples: Any) -> Any:
            return None

    check_fits(partial(decide, limit=3), GroupFilter, key="filter")
    check_fits(Decider(), GroupFilter, key="filter")
    with pytest.raises(PluginError, match="missing a required argument: 'limit'"):
        check_fits(decide, GroupFilter, key="filter")


def test_loading_leaves_the_module_path_as_it_was(folder: Path) -> None:
    import sys

    before = list(sys.path)
    load_plugin("my_functions:reward", RewardFn, key="plugins.reward", folders=[folder])
    assert sys.path == before
