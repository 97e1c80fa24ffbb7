import json
import os
from pathlib import Path

import pytest

from rollfeed.cli.main import main
from rollfeed.environments.registry import named_by_path


def test_env_list_is_a_list_of_objects_with_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    ids = [row["id"] for row in rows]
    assert {"core/copy_text", "core/add_numbers", "core/compare_max"} <= set(ids)
    assert {"core/count_symbol", "core/constrained_words"} <= set(ids)


def test_env_list_names_each_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["core/compare_max"][1:3] == ["0-30", "50%"]


def test_env_sample_shows_the_same_problem_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("3", "3", "4"):
        assert main(["env", "sample", "core/add_numbers", "--level", "6", "--seed", seed, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1] != shown[2]
    assert shown[0]["question"].startswith("What is ")
    assert shown[0]["level"] == 6


def test_env_sample_shows_several_problems_by_index(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "sample", "core/add_numbers", "--count", "3", "--json"]) == 0
    three = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["env", "sample", "core/add_numbers", "--index", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == three[2]
    assert len({each["seed"] for each in three}) == 3


def test_env_sample_asks_in_a_style_and_with_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["env", "sample", "core/sort_numbers", "--json"]
    assert main([*command, "--style", "TinyZero"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert f"User: {shown['question']}\nAssistant: <think>" in shown["prompt"]
    assert main([*command, "--style", "ChatTemplate_NoSystemPrompt"]) == 0
    assert f"<|im_start|>user\n{shown['question']}<|im_end|>" in json.loads(capsys.readouterr().out)["prompt"]
    assert main([*command, "--parameter", "style=compact"]) == 0
    assert json.loads(capsys.readouterr().out)["question"].startswith("sort:")


def test_env_sample_of_an_environment_of_ones_own_is_made_in_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nclass Mine:\n    environment_id, version, summary, max_level = 'my/pid', 1, 'Its process.', 3\n"
        "    def make(self, level, random):\n        return str(os.getpid()), {}, None\n"
        "    def verify(self, params, response): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["env", "sample", "mine.py:Mine", "--level", "2"]) == 0
    head, _, question, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("my/pid level 2")
    assert int(question) != os.getpid()
    assert main(["env", "sample", "mine.py:Mine", "--level", "4"]) == 2
    assert "its levels are 0 to 3" in capsys.readouterr().err
    del named_by_path["my/pid"]


def test_env_sample_of_an_unknown_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "sample", "core/add_number"]) == 2
    error = capsys.readouterr().err
    assert "core/add_numbers" in error
    assert len(error.splitlines()) == 1


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with environments is installed, of which only one can be loaded."""
    (tmp_path / "puzzles.py").write_text(PUZZLES)
    (tmp_path / "ruin.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "gone.py").write_text("import sys\nsys.exit('needs\\na licence')\n")
    about = tmp_path / "puzzles-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: puzzles\nVersion: 1.0\n")
    points = [f"my/{name} = {value}" for name, value in BAD.items()] + ["my/good = puzzles:Good"]
    (about / "entry_points.txt").write_text("\n".join(["[rollfeed.environments]", *points]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)


PUZZLES = """
class Good:
    environment_id, version, summary, max_level = "my/good", 1, "Good.", None
    def make(self, seed, level): ...
    def verify(self, task, response): ...

class Lacking(Good):
    environment_id, verify = "my/lacking", property(lambda self: 1 / 0)

class Half:
    environment_id = "my/half"

class Raises:
    def __init__(self):
        raise RuntimeError("out of\\nmemory")
"""
BAD = {
    "missing": "no_such_module:Env",
    "ruin": "ruin:Env",
    "gone": "gone:Env",
    "none": "puzzles:Nothing",
    "half": "puzzles:Half",
    "lacking": "puzzles:Lacking",
    "raises": "puzzles:Raises",
    "other": "puzzles:Good",
    "odd": "not an object reference",
}


def test_environment_that_cannot_be_loaded_is_listed_with_its_error_beside_the_others(
    package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "list"]) == 0
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(told) >= {"core/copy_text", "my/good", *(f"my/{name}" for name in BAD)}
    assert told["my/good"].endswith("  Good.")
    assert "No module named 'no_such_module_at_all'" in told["my/ruin"]
    assert main(["env", "list", "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name, row in rows.items() if "error" in row} == {f"my/{name}" for name in BAD}
    assert rows["my/good"] == {
        "id": "my/good",
        "version": 1,
        "max_level": None,
        "multi_turn": False,
        "guess_rate": None,
        "summary": "Good.",
    }


@pytest.mark.parametrize("name", BAD)
def test_environment_that_cannot_be_loaded_is_one_line_when_it_is_used(
    package: None, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["env", "sample", f"my/{name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rollfeed: environment 'my/{name}' (entry point {BAD[name]!r}): ")
    assert main(["env", "sample", "core/copy_text"]) == 0


def test_calibrate_gives_accuracy_by_level(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["env", "calibrate", "core/reverse_text", "--levels", "3", "0", "--samples", "4", "--json"]
    options = ["--model", str(tiny_checkpoint), "--max-response-len", "4", "--threads", "1"]
    parameters = ["--parameter", "style=compact", "--parameter", "alphabet_size=10", "--no-chat-template"]
    assert main([*command, *options, *parameters]) == 0
    found = json.loads(capsys.readouterr().out)
    (environment,) = found["environments"]
    levels = environment["levels"]
    assert [level["level"] for level in levels] == [0, 3]
    assert [level["num_prompts"] for level in levels] == [4, 4]
    assert all(level["accuracy_low"] <= level["accuracy"] <= level["accuracy_high"] for level in levels)
    assert found["parameters"] == {"style": "compact", "alphabet_size": 10}
    assert environment["recommended"] in (None, 0, 3)


def test_calibrate_takes_several_environments_and_those_of_their_levels_that_they_have(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["env", "calibrate", "core/grid_walk", "core/a*", "--levels", "0", "12", "--samples", "2", "--json"]
    assert main([*command, "--model", str(tiny_checkpoint), "--max-response-len", "2", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["environments"]
    levels = {each["environment"]: [level["level"] for level in each["levels"]] for each in found}
    assert levels == {"core/grid_walk": [0], "core/add_numbers": [0, 12]}


@pytest.mark.parametrize("others", [[], ["core/add_numbers"]])
def test_calibrate_leaves_out_levels_that_cannot_be_asked(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    others: list[str],
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    environment_id, version, summary, max_level = 'my/short', 1, 'Only level 0.', 3\n"
        "    def make(self, level, random):\n        assert level == 0\n        return f'{random.random()}', {}, '1'\n"
        "    def verify(self, params, response):\n        from rollfeed.types import Verdict\n"
        "        return Verdict.graded(response == '1')\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["env", "calibrate", "mine.py:Mine", *others, "--levels", "0", "1", "--samples", "2", "--json"]
    assert main([*command, "--model", str(tiny_checkpoint), "--max-response-len", "2", "--threads", "1"]) == 0
    mine, *added = json.loads(capsys.readouterr().out)["environments"]
    assert ([each["level"] for each in mine["levels"]], list(mine["unusable"])) == ([0], ["1"])
    assert "AssertionError" in mine["unusable"]["1"]
    assert [([each["level"] for each in of["levels"]], of["unusable"]) for of in added] == [([0, 1], {})] * len(others)
    assert main(["env", "calibrate", "mine.py:Mine", "--levels", "1", "--model", str(tiny_checkpoint)]) == 2
    assert "mine.py:Mine@1" in capsys.readouterr().err
    del named_by_path["my/short"]


def test_calibrate_says_what_it_recommends(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--samples", "2", "--model", str(tiny_checkpoint), "--max-response-len", "2", "--threads", "1"]
    assert main(["env", "calibrate", "core/add_numbers", "--levels", "9", *options]) == 0
    assert "no level of core/add_numbers has an accuracy of 5 to 60 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["core/add_number"], "core/add_numbers"),
        (["core/add_numbers", "--levels", "41"], "--levels 41: the levels of core/add_numbers are 0 to 40"),
        (["core/add_numbers", "--levels", "-1"], "--levels -1"),
        (["core/add_numbers", "--samples", "0"], "--samples 0"),
        (["core/add_numbers", "--temperature", "0"], "--temperature 0.0"),
        (["core/add_numbers", "--max-response-len", "0"], "--max-response-len 0"),
        (["core/add_numbers", "--threads", "-1"], "--threads -1"),
        (["core/add_numbers", "--parameter", "terms"], "--parameter 'terms'"),
        (["core/add_numbers", "--parameter", "terms=3"], "has no parameters"),
        (["core/reverse_text", "--parameter", "alphabet_size=one"], "alphabet_size = 'one'"),
    ],
)
def test_mistakes_are_one_line(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["env", "calibrate", *arguments, "--model", str(tiny_checkpoint)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
