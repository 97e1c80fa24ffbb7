import json
import random
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest


def wait_for_steps(run: Path, count: int, process) -> None:
    """Return when the run has ``count`` lines of metrics; fail when its process ends before."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.read()
        time.sleep(0.01)
    raise AssertionError("the run makes no progress")


def trained_prompts(run: Path) -> list[str]:
    ids: list[str] = []
    for path in sorted((run / "batches").glob("*.parquet")):
        ids += pq.read_table(path, columns=["prompt_id"]).column("prompt_id").to_pylist()
    return ids


def test_a_run_delivers_its_steps_and_show_reads_them(rollfeed, settings_file, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = rollfeed("run", settings_file(), "--out", out)
    assert ran.code == 0, ran.err
    assert "first sample" in ran.out
    assert "last sample" in ran.out
    shown = rollfeed("show", out, "--json").json
    assert shown["run"]["status"] == "finished"
    log = (out / "run.log").read_text().splitlines()
    assert "begins with step 0" in log[0]
    assert [f"step {step} is stored" in line for step, line in enumerate(log[-4:-1])] == [True] * 3
    assert log[-1].endswith(" finished")
    assert [step["step"] for step in shown["steps"]] == [0, 1, 2]
    assert shown["ledger"]["trained"] == 9
    assert len(trained_prompts(out)) == 3 * 3 * 2
    assert len(set(trained_prompts(out))) == 9


def test_json_output_of_a_run_is_one_object_and_nothing_else(rollfeed, settings_file, tmp_path: Path) -> None:
    ran = rollfeed("run", settings_file(num_rollout=1), "--out", tmp_path / "run", "--json")
    assert ran.code == 0
    assert ran.json["num_steps"] == 1
    assert ran.json["ledger"]["trained"] == 3
    (step,) = ran.json["steps"]
    assert (step["step"], step["reward"], step["accuracy"]) == (0, ran.json["reward"], ran.json["accuracy"])
    assert ran.json["loss"] is None
    assert "step 0" in ran.err


def test_a_run_says_at_its_end_what_goes_wrong_and_so_does_show(rollfeed, settings_file, tmp_path: Path) -> None:
    option = ("--set", "sampling.rollout_max_response_len=40")
    ran = rollfeed("run", settings_file(), "--out", tmp_path / "run", "--quiet", *option)
    told = [each["text"] for each in rollfeed("show", tmp_path / "run", "--json").json["advice"]]
    assert any("sampling.rollout_max_response_len (now 40)" in text for text in told)
    assert ran.out.splitlines()[1:] == [f"advice: {text}" for text in told]


def test_quiet_prints_the_result_only(rollfeed, settings_file, tmp_path: Path) -> None:
    ran = rollfeed("run", settings_file(num_rollout=1), "--out", tmp_path / "run", "--quiet")
    assert ran.out.splitlines() == [f"1 step in {tmp_path}/run; look with: rollfeed show {tmp_path}/run"]


def test_check_starts_nothing_and_writes_nothing(rollfeed, settings_file, tmp_path: Path) -> None:
    checked = rollfeed("check", settings_file(), "--out", tmp_path / "run", "--json")
    assert checked.code == 0, checked.err
    assert checked.json["ok"] is True
    assert checked.json["sources"] == ["core/copy_text@0", "core/compare_max@0"]
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_refused_without_overwrite(rollfeed, settings_file, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", settings_file(num_rollout=1)
    assert rollfeed("run", settings, "--out", out).code == 0
    before = trained_prompts(out)
    again = rollfeed("run", settings, "--out", out)
    assert again.code == 2
    assert "--overwrite" in again.err
    assert len(again.err.splitlines()) == 1
    assert trained_prompts(out) == before
    assert rollfeed("run", settings, "--out", out, "--overwrite").code == 0


def test_ctrl_c_stops_the_run_and_keeps_finished_steps(start_rollfeed, rollfeed, settings_file, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_rollfeed("run", settings_file(num_rollout=100_000), "--out", out)
    wait_for_steps(out, 2, process)
    process.send_signal(signal.SIGINT)
    output = process.read()
    assert process.wait() == 130, output
    assert "Traceback" not in output
    shown = rollfeed("show", out, "--json").json
    assert len(shown["steps"]) >= 2
    assert shown["run"]["status"] != "finished"


def test_an_unfinished_run_of_other_settings_is_refused_with_the_differing_keys(
    start_rollfeed, rollfeed, settings_file, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = settings_file(num_rollout=100_000)
    process = start_rollfeed("run", settings, "--out", out)
    wait_for_steps(out, 1, process)
    process.kill()
    process.wait()
    refused = rollfeed("run", settings, "--out", out, "--set", "rollout.n_samples_per_prompt=4")
    assert refused.code == 2
    assert "rollout.n_samples_per_prompt" in refused.err
    assert len(refused.err.splitlines()) == 1


def test_a_directory_in_use_is_refused(start_rollfeed, rollfeed, settings_file, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = settings_file(num_rollout=100_000)
    process = start_rollfeed("run", settings, "--out", out)
    wait_for_steps(out, 1, process)
    refused = rollfeed("run", settings, "--out", out)
    assert refused.code == 2
    assert process.poll() is None


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_kill_9_at_random_instants_loses_no_finished_step(
    start_rollfeed, rollfeed, settings_file, tmp_path: Path, deterministic: bool
) -> None:
    out, unbroken = tmp_path / "run", tmp_path / "unbroken"
    settings = settings_file(num_rollout=100_000)
    option = ["--set", f"rollout.deterministic={str(deterministic).lower()}"]
    instants = random.Random(11)
    for kill in range(3):
        process = start_rollfeed("run", settings, "--out", out, *option)
        wait_for_steps(out, 1 + 5 * kill, process)
        time.sleep(instants.random() * 0.1)  # the instant is what is tested
        process.kill()
        process.wait()
        shown = rollfeed("show", out, "--json").json
        steps = [step["step"] for step in shown["steps"]]
        assert steps == list(range(len(steps)))
        assert all(len(step["groups"]) >= 3 for step in shown["steps"])
    num_rollout = max(60, len(steps))
    longer = ("--set", f"rollout.num_rollout={num_rollout}")
    assert rollfeed("run", settings, "--out", out, *option, *longer).code == 0
    assert len(set(trained_prompts(out))) == num_rollout * 3
    leftovers = [path for path in out.rglob("*") if "tmp" in path.name]
    assert leftovers == []
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(num_rollout))
    if deterministic:
        assert rollfeed("run", settings, "--out", unbroken, *option, *longer).code == 0
        for path in sorted((unbroken / "batches").glob("*.parquet")):
            assert (out / "batches" / path.name).read_bytes() == path.read_bytes()
