"""`rollfeed convert-slime` makes settings that `rollfeed check` accepts, and says what they leave out."""

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollfeed.cli.main import main

SCRIPTS = Path(__file__).parents[1] / "compat" / "convert" / "scripts"


@pytest.fixture
def in_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS)
    for name in ("MODE", "SERVERS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def converted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["convert-slime", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {"code": code, **found}


@pytest.mark.usefixtures("in_scripts")
def test_a_script_with_arrays_passes_the_check_and_every_flag_is_accounted_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = converted(capsys, "grpo.sh", "--check")
    assert (found["code"], found["check"]["ok"], found["check"]["trains"]) == (0, True, True)
    assert found["check"]["eval_sets"] == ["held"]
    assert found["settings"]["rollout"] == {"num_rollout": 30, "rollout_batch_size": 8, "n_samples_per_prompt": 4}
    left = {each["flag"].split()[0] for each in found["not_carried"]}
    assert {"--colocate", "--tensor-model-parallel-size", "--rotary-base", "--sglang-mem-fraction-static"} <= left
    assert not left & set(found["carried"])
    assert all(each["where"] and each["reason"] for each in found["not_carried"])


@pytest.mark.usefixtures("in_scripts")
def test_an_asynchronous_script_on_servers_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    found = converted(capsys, "dapo_async.sh", "--check")
    assert (found["code"], found["check"]["ok"]) == (0, True), found
    settings = found["settings"]
    assert settings["rollout"]["mode"] == "async"
    assert settings["engine"]["sglang"] == {"workers": ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]}
    assert settings["filters"]["dynamic_sampling"] == [{"name": "reward_std"}]
    assert found["check"]["eval_prompts"]["held-greedy"]["num_prompts"] == 2
    assert settings["seed"] == 5


@pytest.mark.usefixtures("in_scripts")
def test_a_script_in_one_text_passes_the_check_and_does_not_train(capsys: pytest.CaptureFixture[str]) -> None:
    found = converted(capsys, "partial.sh", "--check")
    assert (found["code"], found["check"]["ok"], found["check"]["trains"]) == (0, True, False), found
    assert found["settings"]["rollout"]["mode"] == "partial"
    assert "train" not in found["settings"]


def test_a_file_is_written_once_and_what_is_left_out_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.toml"
    flags = "--rollout-batch-size 8 --num-rollout 3 --colocate"
    assert main(["convert-slime", flags, "--out", str(out)]) == 0
    assert "not carried over: --colocate: " in capsys.readouterr().out
    assert tomllib.loads(out.read_text())["rollout"]["rollout_batch_size"] == 8
    assert main(["convert-slime", flags, "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["convert-slime", flags, "--out", str(out), "--overwrite"]) == 0


def test_settings_that_the_check_refuses_are_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["convert-slime", "--hf-checkpoint tiny --rollout-batch-size 8 --prompt-data absent.jsonl", "--check"])
        == 1
    )
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["prompts"]["datasets"][0]["path"] == "absent.jsonl"
    assert "absent.jsonl" in printed.err


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("absent.sh", "absent.sh: no such script, and no flags"),
        ("--rollout-batch-size x --num-rollout 3", "--rollout-batch-size x: is not an integer"),
        ("--tensor-model-parallel-size 2", "there are no flags of slime's in it"),
    ],
)
def test_a_source_that_is_wrong_is_exit_code_2_and_one_line(
    source: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert-slime", source]) == 2
    printed = capsys.readouterr()
    assert problem in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_script_comes_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("python train.py --rollout-batch-size 8\n"))
    assert main(["convert-slime", "-"]) == 0
    assert "rollout_batch_size = 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--rollout-batch-size", "8", "--rollout-stop", "a b", "--check-weight-update-equal"],
        ["--rollout-batch-size 8 --rollout-stop 'a b'", "--check-weight-update-equal"],
        ["--", "--rollout-batch-size=8", "--rollout-stop", "a b", "--check-weight-update-equal"],
    ],
)
def test_flags_need_no_quotes_around_them(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = converted(capsys, *words, "--out", str(tmp_path / "run.toml"))
    assert found["settings"]["rollout"]["rollout_batch_size"] == 8
    assert found["settings"]["sampling"]["rollout_stop"] == ["a b"]
    assert [each["flag"] for each in found["not_carried"]] == ["--check-weight-update-equal"]


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert-slime", "--help"])
    assert "rollfeed convert-slime scripts/run-qwen3-4B.sh --out run.toml --check" in capsys.readouterr().out


def test_plug_ins_of_a_script_pass_the_check_with_the_arguments_of_its_custom_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "custom.yaml").write_text("max_turns: 3\n")
    monkeypatch.chdir(Path(__file__).parents[2] / "examples" / "slime")
    flags = (
        f"--hf-checkpoint tiny --prompt-data {SCRIPTS}/data/questions.jsonl --input-key prompt --label-key label "
        "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 2 --rollout-max-response-len 32 --group-rm "
        "--rollout-max-context-len 128 --custom-rm-path slime_verifier.verify_group --rm-url http://127.0.0.1:1/x "
        "--custom-generate-function-path slime_search.generate --debug-rollout-only "
        f"--custom-config-path {tmp_path}/custom.yaml"
    )
    found = converted(capsys, flags, "--check")
    assert (found["code"], found["check"]["ok"]) == (0, True), found
    assert found["settings"]["plugins"] == {
        "generate": "slime:slime_search.generate",
        "group_reward": "slime:slime_verifier.verify_group",
        "slime_args": {"max_turns": 3},
    }
