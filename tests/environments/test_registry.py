from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rollfeed.environments import ENTRY_POINT_GROUP, EnvironmentGrader, EnvironmentRegistry
from rollfeed.environments.registry import named_by_path
from rollfeed.errors import ConfigError, PluginError
from rollfeed.workers import WorkerPool


@pytest.fixture(autouse=True)
def nothing_is_named_by_path() -> Iterator[None]:
    """Other tests of this process may have named environments by their paths."""
    named_by_path.clear()
    yield
    named_by_path.clear()


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=ENTRY_POINT_GROUP)


def registry_with(*points: EntryPoint) -> EnvironmentRegistry:
    return EnvironmentRegistry(find_entry_points=lambda: points)


def test_built_in_environments_are_there() -> None:
    assert registry_with().ids() == (
        "core/add_numbers",
        "core/calc_tool",
        "core/close_brackets",
        "core/compare_max",
        "core/constrained_words",
        "core/copy_text",
        "core/count_dots",
        "core/count_symbol",
        "core/grid_walk",
        "core/guess_number",
        "core/lookup_table",
        "core/make_target",
        "core/mod_chain",
        "core/name_colour",
        "core/next_in_pattern",
        "core/reverse_text",
        "core/sort_numbers",
    )


def test_listed_environments_carry_id_and_summary() -> None:
    registry = registry_with()
    environments = [registry.get(environment_id) for environment_id in registry.ids()]
    assert [environment.environment_id for environment in environments] == list(registry.ids())
    assert all(environment.summary and "\n" not in environment.summary for environment in environments)


def test_own_environments_are_told_from_those_of_other_packages(parity: Any) -> None:
    registry = EnvironmentRegistry([parity], find_entry_points=lambda: [entry_point("my/broken", "no_such_module:E")])
    assert registry.get("my/parity") is parity
    assert registry.is_own("my/parity")
    assert not registry.is_own("my/broken")
    assert "my/parity" in registry
    assert "my/broken" in registry
    assert "my/parrot" not in registry


def test_loaded_environment_of_another_package_is_not_an_own_one() -> None:
    point = entry_point("core/copy_text", "rollfeed.environments.builtin:CopyText")
    registry = EnvironmentRegistry([], find_entry_points=lambda: [point])
    registry.get("core/copy_text")
    assert not registry.is_own("core/copy_text")


@pytest.mark.parametrize("given", ["core/copy_txt", "copy_text", "rlve/copy_text"])
def test_unknown_id_names_the_nearest(given: str) -> None:
    with pytest.raises(ConfigError, match="did you mean core/copy_text"):
        registry_with().get(given)


def test_unknown_id_without_a_near_one_gets_the_namespaces() -> None:
    points = [entry_point(f"my/{number}", "no_such_module:E") for number in range(500)]
    with pytest.raises(ConfigError, match=r"known here: core/\* \(17\), my/\* \(500\); see rollfeed env"):
        registry_with(*points).get("zzz")


def test_id_cannot_be_taken_twice(parity: Any) -> None:
    with pytest.raises(ConfigError, match="'my/parity' is registered already"):
        EnvironmentRegistry([parity, parity])


def test_id_must_have_a_namespace(parity: Any) -> None:
    parity.environment_id = "parity"
    with pytest.raises(ConfigError, match="write it as namespace/name"):
        EnvironmentRegistry([parity])


def test_what_lacks_a_verifier_does_not_fit() -> None:
    class NoVerifier:
        environment_id, version, summary, max_level = "my/none", 1, "", None

        def make(self) -> None: ...

    with pytest.raises(PluginError, match="it lacks verify"):
        EnvironmentRegistry([NoVerifier()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("version", "1", "its version is '1'; that must be a whole number"),
        (
            "max_level",
            "three",
            "its max_level is 'three'; that must be a whole number or None",
        ),
        ("summary", None, "its summary is None; that must be a text"),
        ("make", 7, "its make is 7; that must be a method"),
    ],
)
def test_an_attribute_of_another_kind_does_not_fit(parity: Any, key: str, value: object, complaint: str) -> None:
    environment = type(parity)()
    setattr(environment, key, value)
    with pytest.raises(PluginError, match=f"does not fit Environment: {complaint}"):
        EnvironmentRegistry([environment])


def test_entry_point_is_listed_without_being_imported() -> None:
    assert "my/broken" in registry_with(entry_point("my/broken", "no_such_module:Env")).ids()


def test_entry_point_is_loaded_when_asked_for() -> None:
    point = entry_point("core/copy_text", "rollfeed.environments.builtin:CopyText")
    registry = EnvironmentRegistry([], find_entry_points=lambda: [point])
    assert registry.get("core/copy_text").environment_id == "core/copy_text"


def test_broken_entry_point_is_named() -> None:
    registry = registry_with(entry_point("my/broken", "no_such_module:Env"))
    with pytest.raises(PluginError, match=r"'my/broken' \(entry point 'no_such_module:Env'\): .*ModuleNotFoundError"):
        registry.get("my/broken")
    assert registry.get("core/copy_text")


def test_entry_point_of_another_id_is_refused() -> None:
    registry = registry_with(entry_point("my/copy", "rollfeed.environments.builtin:CopyText"))
    with pytest.raises(PluginError, match="its environment_id is 'core/copy_text'"):
        registry.get("my/copy")


PUZZLE = """
from rollfeed.types import Correct, Verdict

class Puzzle:
    environment_id, version, summary, max_level = "my/puzzle", 1, "Says x.", 0

    def make(self, level, random):
        return "Say x.", {}, "x"

    def verify(self, params, response):
        return Verdict(reward=float(response == "x"), correct=Correct.YES if response == "x" else Correct.NO)
"""


@pytest.fixture
def puzzle_folder(tmp_path: Path) -> Path:
    (tmp_path / "puzzle_file.py").write_text(PUZZLE)
    return tmp_path


@pytest.mark.parametrize("path", ["puzzle_file.py:Puzzle", "puzzle_file:Puzzle"])
async def test_an_environment_beside_the_settings_is_named_by_its_path_and_verified_in_a_worker(
    puzzle_folder: Path, path: str
) -> None:
    environment = EnvironmentRegistry(folders=[puzzle_folder]).get(path)
    assert environment.environment_id == "my/puzzle"
    registry = EnvironmentRegistry()
    assert "my/puzzle" in registry
    async with WorkerPool(num_workers=1) as workers:
        grader = EnvironmentGrader(registry, workers=workers, deadline_seconds=30.0)
        metadata = {"environment": "my/puzzle", "version": 1, "params": {}}
        assert (await grader("x", None, metadata)).reward == 1.0
        assert (await grader("y", None, metadata)).reward == 0.0


def test_an_environment_by_path_that_is_none_is_told(puzzle_folder: Path) -> None:
    registry = EnvironmentRegistry(folders=[puzzle_folder])
    with pytest.raises(PluginError, match="puzzle_file has no 'Riddle'"):
        registry.get("puzzle_file:Riddle")
    (puzzle_folder / "taken_id.py").write_text(PUZZLE.replace("my/puzzle", "core/copy_text"))
    with pytest.raises(ConfigError, match="its id 'core/copy_text' is taken"):
        registry.get("taken_id.py:Puzzle")
