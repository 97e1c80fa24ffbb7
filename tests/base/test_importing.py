from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollfeed.base.importing import find_function, import_object, is_async
from rollfeed.errors import PluginError


def load(path: str, *folders: Path) -> Any:
    return import_object(path, key="plugins.reward", folders=folders)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("settings")
    (tmp_path / "files_of_mine.py").write_text(
        "import beside_files\nclass Holder:\n    @staticmethod\n    def score(): return beside_files.VALUE\n"
    )
    (tmp_path / "beside_files.py").write_text("VALUE = 7\n")
    (tmp_path / "json.py").write_text("def score(): return 8\n")
    (tmp_path / "with-dash.py").write_text("def score(): return 9\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    return tmp_path


def test_a_file_beside_the_settings_is_imported_with_what_lies_beside_it(folder: Path) -> None:
    before = list(sys.path)
    assert load("files_of_mine.py:Holder.score", Path("elsewhere"), folder)() == 7
    assert sys.path == before


def test_a_file_and_its_module_are_one(folder: Path) -> None:
    assert load("files_of_mine.py:Holder", folder) is load("files_of_mine:Holder", folder)
    assert load(f"{folder}/files_of_mine.py:Holder") is load("files_of_mine:Holder", folder)


def test_a_file_may_have_the_name_of_an_installed_module_or_none_at_all(folder: Path) -> None:
    score = load("json.py:score", folder)
    assert score() == 8
    assert load("json.py:score", folder) is score
    assert load("with-dash.py:score", folder)() == 9
    assert load("json:dumps", folder)({}) == "{}"
    assert pickle.loads(pickle.dumps(score)) is score


def test_modules_of_one_name_in_several_folders_are_several(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_named_module.py").write_text(f"def score_{name}(): return {value}\n")
    for _ in range(2):
        assert load("same_named_module:score_one", tmp_path / "one")() == 1
        assert load("same_named_module:score_two", tmp_path / "two")() == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("score", "write it as module:name or file.py:name"),
        ("files_of_mine.py", "write it as module:name or file.py:name"),
        ("nowhere.py:score", "no file 'nowhere.py' in "),
        ("leaving:score", "importing it failed: SystemExit: 0"),
        ("leaving.py:score", "importing it failed: SystemExit: 0"),
    ],
)
def test_a_path_that_leads_nowhere_is_told_in_one_line(folder: Path, path: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        load(path, folder)
    assert str(caught.value).startswith(f"plugins.reward = {path!r}: ")
    assert "\n" not in str(caught.value)


def test_functions_are_found_by_dots_and_by_colons() -> None:
    assert find_function("os.path.basename")("a/b") == "b"
    assert find_function("operator:add")(1, 2) == 3


def test_async_is_seen_through_partials_and_objects() -> None:
    async def waits() -> None: ...

    class Waits:
        async def __call__(self) -> None: ...

    assert is_async(waits)
    assert is_async(partial(partial(waits)))
    assert is_async(Waits())
    assert not is_async(len)
    assert not is_async(partial(len))
