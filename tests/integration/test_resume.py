import json
from pathlib import Path

import pytest

DETERMINISTIC = ("--set", "rollout.deterministic=true")


def batches(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "batches").iterdir())}


def content_of(path: Path) -> dict[str, bytes]:
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    files.pop("run.lock", None)
    return files


@pytest.fixture
def finished(rollfeed, settings_file, tmp_path: Path) -> Path:
    """A finished run of three steps."""
    out = tmp_path / "finished"
    ran = rollfeed("run", settings_file(), "--out", out, "--quiet", *DETERMINISTIC)
    assert ran.code == 0, ran.err
    return out


@pytest.fixture
def refused(rollfeed, finished: Path):
    """Return a function that checks that a command is refused in one line and changes nothing."""

    def assert_refused(*arguments: str | Path, expected: str) -> None:
        before = content_of(finished)
        result = rollfeed("run", *arguments)
        assert result.code == 2, result.err
        assert result.out == ""
        assert len(result.err.splitlines()) == 1, result.err
        assert expected in result.err, result.err
        assert content_of(finished) == before

    return assert_refused


def test_a_killed_run_is_resumed_without_a_settings_file(
    start_rollfeed, rollfeed, finished: Path, settings_file, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = settings_file(num_rollout=1000)
    process = start_rollfeed("run", settings, "--out", out, *DETERMINISTIC)
    for line in process.stdout:
        if line.startswith("step 0"):
            break
    process.kill()
    process.wait()
    settings.unlink()
    steps = len(rollfeed("show", out, "--json").json["steps"])
    resumed = rollfeed("run", "--resume", out, "--set", f"rollout.num_rollout={max(3, steps)}", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["num_resumed_steps"] == steps >= 1
    assert {name: batches(out)[name] for name in batches(finished)} == batches(finished)
    assert rollfeed("show", out, "--json").json["run"]["status"] == "finished"


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_finished_run_goes_back_to_a_step_and_makes_the_same_again(rollfeed, finished: Path, step: int) -> None:
    before = batches(finished)
    ran = rollfeed("run", "--resume", finished, "--step", str(step), "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["num_resumed_steps"], ran.json["num_steps"]) == (step + 1, 3)
    assert batches(finished) == before
    shown = rollfeed("show", finished, "--json").json
    assert [each["step"] for each in shown["steps"]] == [0, 1, 2]
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_settings_file_may_be_given_too_and_has_to_agree(rollfeed, refused, finished: Path, settings_file) -> None:
    refused("--resume", finished, "--step", "1", settings_file(), expected="rollout.deterministic = true there, false")
    ran = rollfeed("run", settings_file(num_rollout=4), "--resume", finished, "--step", "1", *DETERMINISTIC)
    assert ran.code == 0, ran.err
    assert len(batches(finished)) == 4


def test_a_finished_run_is_not_resumed_without_a_step(refused, finished: Path) -> None:
    refused("--resume", finished, expected="holds a finished run; choose another --out, or replace it with --overwri")
    refused("--resume", finished, expected=f"go on after one of its steps with --resume {finished} --step N")


@pytest.mark.parametrize("step", ["3", "-1"])
def test_a_step_that_is_not_committed(refused, finished: Path, step: str) -> None:
    refused("--resume", finished, "--step", step, expected=f"has no step {step} to go back to; it has steps 0 to 2")


def test_options_that_contradict_each_other(refused, finished: Path, settings_file) -> None:
    refused(expected="nothing to run: give a settings file, or --resume DIR")
    refused(settings_file(), "--step", "1", expected="--step 1: says where --resume DIR goes on; give --resume too")
    refused("--resume", finished, "--out", finished, expected="leave out --out")
    refused("--resume", finished, "--overwrite", expected="leave out --overwrite")


def test_a_directory_without_a_run(refused, tmp_path: Path, settings_file) -> None:
    refused("--resume", tmp_path / "none", expected="none: does not exist; give the directory that `rollfeed run`")
    refused("--resume", tmp_path / "none", settings_file(), expected="none: does not exist")
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    refused("--resume", tmp_path / "empty", "--step", "0", expected="empty: is not a run directory")
    refused("--resume", settings_file(), expected="run.toml: is not a directory")


def test_a_damaged_state(rollfeed, refused, finished: Path) -> None:
    state = finished / "states" / "step-000001.state"
    state.write_bytes(state.read_bytes()[:-1])
    result = rollfeed("run", "--resume", finished, "--step", "1", "--quiet")
    assert result.code == 2
    (line,) = [line for line in result.err.splitlines() if line.startswith("rollfeed: ")]
    assert "states/step-000001.state: is damaged" in line
    assert line.endswith(f"go back to before step 1: rollfeed verify {finished} --restore 0")
    assert len(batches(finished)) == 3


def test_a_run_that_another_process_works_on(start_rollfeed, rollfeed, settings_file, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_rollfeed("run", settings_file(num_rollout=100_000), "--out", out)
    for line in process.stdout:
        if line.startswith("step 0"):
            break
    for option in ((), ("--step", "0")):
        refused = rollfeed("run", "--resume", out, *option)
        assert refused.code == 2
        assert f"process {process.pid} is working on this run" in refused.err
        assert len(refused.err.splitlines()) == 1
    assert process.poll() is None


def test_data_files_are_found_from_another_folder(rollfeed, tmp_path: Path, tiny_checkpoint: Path, monkeypatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "data.jsonl").write_text("".join(f'{{"q": "{number}", "a": "1"}}\n' for number in range(4)))
    settings = project / "run.toml"
    settings.write_text(
        f"""
        model.checkpoint = "{tiny_checkpoint}"
        prompts.datasets = [{{path = "data.jsonl", input_key = "q", label_key = "a"}}]
        reward.rm_type = "exact"
        rollout = {{num_rollout = 2, rollout_batch_size = 1, n_samples_per_prompt = 2}}
        sampling.rollout_max_response_len = 4
        engine = {{threads = 1, num_slots = 4, context_length = 128}}
        """
    )
    assert rollfeed("run", settings, "--out", tmp_path / "run", "--quiet").code == 0
    monkeypatch.chdir("/")
    ran = rollfeed("run", "--resume", tmp_path / "run", "--step", "0", "--quiet")
    assert ran.code == 0, ran.err


def test_help_says_that_the_step_is_kept(rollfeed) -> None:
    assert "the last step that is kept" in " ".join(rollfeed("run", "--help").out.split())
