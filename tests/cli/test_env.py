import json

import pytest

from rollfeed.cli.main import main


def test_env_list_is_a_list_of_objects_with_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    ids = [row["id"] for row in rows]
    assert {"core/copy_text", "core/add_numbers", "core/compare_max"} <= set(ids)
    assert {"core/count_symbol", "core/constrained_words"} <= set(ids)


def test_env_list_names_each_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    assert "core/copy_text" in capsys.readouterr().out


def test_env_sample_shows_the_same_problem_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("3", "3", "4"):
        assert main(["env", "sample", "core/add_numbers", "--level", "6", "--seed", seed, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1] != shown[2]
    assert shown[0]["question"].startswith("What is ")
    assert shown[0]["level"] == 6


def test_env_sample_of_an_unknown_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "sample", "core/add_number"]) == 2
    error = capsys.readouterr().err
    assert "core/add_numbers" in error
    assert len(error.splitlines()) == 1
