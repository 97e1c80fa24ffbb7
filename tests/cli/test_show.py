from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from rollfeed.cli import show
from rollfeed.errors import ConfigError, RunDirectoryError
from rollfeed.protocols import Isolation, IsolationLevel
from rollfeed.store import RunDirectory, RunReader
from rollfeed.testing import sample_of
from rollfeed.types import (
    Correct,
    Dropped,
    Group,
    LedgerCounts,
    Prompt,
    Rollout,
    RunState,
    SampleStatus,
    StepCommit,
    TrainBatch,
    Verdict,
)

SETTINGS = {"seed": 3, "model": {"checkpoint": "tiny-model"}, "rollout": {"rollout_batch_size": 1}}
LONG_WORD = "w" * 300


def make_group(group_index: int, rewards: list[float], *, question: str, response: str) -> Group:
    prompt = Prompt(
        prompt_id=f"sums/{group_index}",
        source="sums",
        text=f"<user>{question}<assistant>",
        token_ids=np.arange(4, dtype=np.int32),
        messages=({"role": "user", "content": question},),
        label=4,
    )
    rollouts = []
    for number, reward in enumerate(rewards):
        index = 2 * group_index + number
        sample = sample_of(
            range(4),
            range(4, 7),
            loss_mask=np.array([1, 1, 0], np.float32),
            logprobs=np.zeros(3, np.float32),
            status=SampleStatus.TRUNCATED if number else SampleStatus.COMPLETED,
            group_index=group_index,
            index=index,
            rollout_id=index,
            response=f"{response} {number}",
        )
        verdict = Verdict(reward=reward, correct=Correct.YES if reward else Correct.NO, extracted=f"[{number}]")
        rollouts.append(Rollout(rollout_id=index, samples=(sample,)).with_reward(verdict))
    return Group(group_index=group_index, prompt=prompt, rollouts=tuple(rollouts))


def make_commit(step: int) -> StepCommit:
    kept, lost = 2 * step - 2, 2 * step - 1
    return StepCommit(
        batch=TrainBatch(
            step=step,
            policy_version=step - 1,
            groups=(make_group(kept, [1.0, 0.0], question=f"What is {kept} [plus] 1?", response="It is\x1b[31m"),),
            advantages_S=np.array([0.5, -0.5], np.float32),
            metrics={
                "rollout/reward_mean": 0.5,
                "rollout/truncated_ratio": 0.5,
                "perf/tokens_per_second": 1234.0,
                "rollout/empty": float("nan"),
            },
        ),
        dropped=(
            Dropped(
                group=make_group(lost, [0.0, 0.0], question=f"Hard {lost} {LONG_WORD}", response=LONG_WORD),
                reason="zero_std_0.0",
            ),
        ),
        wasted_tokens={"dropped": 6},
        state=RunState(
            next_step=step + 1,
            next_group_index=2 * step,
            source={},
            ledger=LedgerCounts(drawn=2 * step, trained=step, dropped=step),
        ),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "demo"
    with RunDirectory.open(path, settings=SETTINGS, identity={"seed": 3}, overwrite=False) as run:
        for step in (1, 2):
            run.commit(make_commit(step), reward_key=None)
        run.finish()
    return path


def show_of(path: Path, capsys, *arguments: str) -> str:
    """Return what the command prints for a run or several."""
    parser = argparse.ArgumentParser(prog="rollfeed")
    show.register(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["show", str(path), *arguments])
    assert parsed.run(parsed) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def words_of(text: str) -> str:
    """Return a text as one line, as it was before it was wrapped."""
    return " ".join(text.split())


@pytest.fixture
def shown(directory, capsys) -> Callable[..., str]:
    """What the command prints for the run, given more arguments."""
    return lambda *arguments: show_of(directory, capsys, *arguments)


def test_show_prints_steps_rewards_drop_reasons_waste_and_the_ledger(shown) -> None:
    text = shown()
    assert "finished; 2 steps, 2 groups kept, 2 dropped; 12 tokens to train on, 12 wasted" in words_of(text)
    assert "model tiny-model, groups a step 1, seed 3" in text
    assert "dropped groups: zero_std_0.0 2" in text
    assert "wasted tokens: dropped 12" in text
    assert "prompts: 4 drawn = 2 trained + 2 dropped" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["2", "1", "1", "0.500", "50%", "1234", "6"] in rows


@pytest.mark.parametrize(
    ("last", "told"), [(30, "the newest 30 of 31 steps; --limit 31 shows all, --step N one"), (29, None)]
)
def test_of_many_steps_the_newest_are_shown_and_how_to_see_the_others(tmp_path, capsys, last, told) -> None:
    path = tmp_path / "run"
    with RunDirectory.open(path, settings=SETTINGS, identity={"seed": 3}, overwrite=False) as run:
        for step in range(last + 1):
            commit = make_commit(step + 1)
            run.commit(replace(commit, batch=replace(commit.batch, step=step)), reward_key=None)
    lines = show_of(path, capsys).splitlines()
    assert [line for line in lines if line.startswith("the newest")] == ([] if told is None else [told])
    shown_steps = [int(line[:4]) for line in lines if line[:4].strip().isdecimal()]
    assert shown_steps == list(range(last + 1))[-30:]


def test_one_step_is_told_as_one(tmp_path, capsys) -> None:
    path = tmp_path / "run"
    with RunDirectory.open(path, settings=SETTINGS, identity={"seed": 3}, overwrite=False) as run:
        run.commit(make_commit(1), reward_key=None)
    assert "; 1 step, 1 group kept, 1 dropped; " in words_of(show_of(path, capsys))
    with RunReader(path) as reader, pytest.raises(RunDirectoryError, match=r"has no step 9; it has step 1$"):
        reader.step(9)


def test_show_has_the_curve_of_the_evaluations(tmp_path, capsys) -> None:
    path = tmp_path / "trained"
    with RunDirectory.open(path, settings=SETTINGS, identity={"seed": 3}, overwrite=False) as run:
        run.commit(make_commit(1), reward_key=None)
    found = {
        **{"num_prompts": 50, "num_failed": 0, "reward_mean": 0.5, "response_length_mean": 9.0},
        **{"truncated_ratio": 0.0, "accuracy_low": 0.25, "accuracy_high": 0.75},
    }
    with (path / "eval.jsonl").open("w") as log:
        for step, accuracy in ((0, 0.25), (1, 0.5)):
            log.write(json.dumps({"step": step, "sets": {"sums": {**found, "accuracy": accuracy}}}) + "\n")
        log.write('{"step": 2, "se')
    lines = show_of(path, capsys).splitlines()
    of_one_step = show_of(path, capsys, "--step", "1")
    start = lines.index("held-out accuracy by batches trained on")
    assert lines[start + 1] == "  sums: 0.250 -> 0.500 (0.250 to 0.750)"
    assert lines[start + 11].split() == ["0", "batches", "2"]
    assert "held-out" not in of_one_step


def test_a_step_is_shown_with_its_kept_and_dropped_groups_and_their_questions(shown) -> None:
    lines = shown("--step", "2").splitlines()
    (kept,) = [line for line in lines if "What is 2 [plus] 1?" in line]
    (dropped,) = [line for line in lines if "Hard 3 www" in line]
    assert kept.split()[:5] == ["2", "1", "0", "3", "kept"]
    assert "dropped: zero_std_0.0" in dropped
    assert "step 2, policy version 1" in lines
    assert not any("What is 0" in line for line in lines)


def test_groups_of_a_large_step_are_shown_up_to_a_limit(shown) -> None:
    lines = shown("--step", "2", "--limit", "1").splitlines()
    assert "the first 1 of 2 groups; --limit 2 shows all" in lines
    assert not any("Hard 3" in line for line in lines)


@pytest.mark.parametrize(
    "arguments", [(), ("--step", "2"), ("--worst",), ("--wrong",), ("--filter", "dropped")], ids=" ".join
)
def test_lines_fit_80_columns(directory, shown, arguments) -> None:
    lines = shown(*arguments).replace(str(directory), "runs/demo").splitlines()
    assert max(map(cell_len, lines)) <= 80


def test_show_of_one_group_prints_every_text_whole(shown) -> None:
    text = shown("--group", "3")
    assert text.startswith("group 3 of step 2, dropped: zero_std_0.0\n")
    assert f"<user>Hard 3 {LONG_WORD}<assistant>\n" in text
    assert f"{LONG_WORD} 0\n" in text
    assert '-- member 1, truncated, 3 tokens, reward 0.0, wrong, extracted "[1]"\n' in text


def test_output_to_a_pipe_is_plain_and_cannot_command_a_terminal(shown) -> None:
    text = shown() + shown("--group", "0")
    assert "\x1b" not in text
    assert "It is\\x1b[31m 0" in text


def test_json_is_one_object_with_run_steps_and_ledger(shown) -> None:
    view = json.loads(shown("--json"))
    assert (view["run"]["status"], view["run"]["settings"]) == ("finished", SETTINGS)
    assert [step["step"] for step in view["steps"]] == [1, 2]
    assert view["ledger"]["drawn"] == 4
    assert view["totals"]["num_groups"] == 2
    step = view["steps"][1]
    assert (step["wasted_tokens"], step["drop_reasons"]) == ({"dropped": 6}, {"zero_std_0.0": 1})
    assert step["metrics"]["rollout/reward_mean"] == 0.5
    assert step["metrics"]["rollout/empty"] is None
    (kept,), (dropped,) = step["groups"], step["dropped"]
    assert (kept["group_index"], kept["rewards"], kept["correct"]) == (2, [1.0, 0.0], ["yes", "no"])
    assert kept["response_lengths"] == [3, 3]
    assert (dropped["group_index"], dropped["drop_reason"]) == (3, "zero_std_0.0")


def test_json_of_one_step_has_only_that_step(shown) -> None:
    assert [step["step"] for step in json.loads(shown("--json", "--step", "1"))["steps"]] == [1]


def test_json_of_one_group_has_texts_rewards_and_token_counts(shown) -> None:
    view = json.loads(shown("--json", "--group", "2"))
    assert (view["step"], view["group_index"], view["kept"], view["label"]) == (2, 2, True, 4)
    assert (view["question"], view["prompt_tokens"]) == ("What is 2 [plus] 1?", 4)
    first, second = view["samples"]
    assert (first["response"], first["reward"], first["correct"]) == ("It is\x1b[31m 0", 1.0, "yes")
    assert (second["status"], second["extracted"]) == ("truncated", "[1]")
    assert (second["response_length"], second["trained_tokens"]) == (3, 2)


ISOLATION = Isolation(level=IsolationLevel.LIMITS, network_cut=False, files_hidden=False, detail="no bwrap\x1b[31m")


def test_isolation_level_of_programs_is_shown_as_the_run_recorded_it(tmp_path, capsys) -> None:
    def shown_run(*, as_json: bool) -> str:
        return show_of(tmp_path, capsys, *(["--json"] if as_json else []))

    with RunDirectory.open(tmp_path, settings=SETTINGS, identity={}, overwrite=False) as run:
        assert "programs run at" not in shown_run(as_json=False)
        assert json.loads(shown_run(as_json=True))["run"]["isolation"] is None
        run.record_isolation(ISOLATION)
    line = "programs run at isolation level limits (NETWORK OPEN, MACHINE'S FILES VISIBLE): no bwrap\\x1b[31m\n"
    assert line.strip() in words_of(shown_run(as_json=False))
    assert json.loads(shown_run(as_json=True))["run"]["isolation"] == {
        "level": "limits",
        "network_cut": False,
        "files_hidden": False,
        "detail": "no bwrap\x1b[31m",
    }


def test_a_run_without_steps_says_so(tmp_path, capsys) -> None:
    RunDirectory.open(tmp_path, settings=SETTINGS, identity={}, overwrite=False).close()
    text = words_of(show_of(tmp_path, capsys))
    assert "interrupted; 0 steps" in text
    assert "no step is committed yet" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--step", "9"], "has no step 9; it has steps 1 to 2"), (["--group", "9"], "no step has group 9")],
)
def test_a_step_or_group_that_is_not_there_is_refused(shown, arguments, message) -> None:
    with pytest.raises(RunDirectoryError, match=message):
        shown(*arguments)


def test_a_directory_without_a_run_is_refused(tmp_path, capsys) -> None:
    with pytest.raises(ConfigError, match="has no run and no evaluation in it"):
        show_of(tmp_path, capsys, "--json")


def test_help_has_an_example() -> None:
    parser = argparse.ArgumentParser(prog="rollfeed")
    subparsers = parser.add_subparsers()
    show.register(subparsers)
    help_text = io.StringIO()
    subparsers.choices["show"].print_help(help_text)
    assert "rollfeed show runs/demo --group 5" in help_text.getvalue()
