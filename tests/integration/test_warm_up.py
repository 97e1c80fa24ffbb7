"""`rollfeed train` from nothing: a tiny model, a warm-up, and what a kill, a failure or `--overwrite` do to it."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

STOP_ACCURACY = 0.4
NUM_PROMPTS = 200
SETTINGS = f"""
seed = 3

[model]
checkpoint = "tiny"

[model.tiny]
characters = "abcdrev:="
hidden_size = 32
num_layers = 2
num_heads = 2

[[prompts.environments]]
id = "core/reverse_text"
level = 0
apply_chat_template = false
parameters = {{ style = "compact", alphabet_size = 4 }}

[rollout]
num_rollout = 4
rollout_batch_size = 4
n_samples_per_prompt = 6
deterministic = true

[sampling]
rollout_max_response_len = 4
rollout_skip_special_tokens = true

[engine]
context_length = 32
num_slots = 32
threads = 1

[train]
checkpoint_interval = 2
eval_interval = 2

[train.warm_up]
stop_accuracy = {STOP_ACCURACY}
wrong_share = 0.3
batch_size = 32
probe_interval = 10
probe_prompts = {NUM_PROMPTS}
max_updates = 300
learning_rate = 3e-3

[train.loss]
kl_coefficient = 0.05

[train.optimizer]
learning_rate = 1e-3

[plugins]
sample_hook = "killing_hook:keep"

[eval]
n_samples_per_prompt = 25

[[eval.environments]]
id = "core/reverse_text"
level = 0
split = "train"
apply_chat_template = false
parameters = {{ style = "compact", alphabet_size = 4 }}
"""
HOOK = '''
"""Kills its process at the first sample that is made when a file has a text, or a folder is there."""
import json
import os
import signal
from pathlib import Path

when = Path(__file__).with_name("kill_when.json")

def keep(sample, prompt):
    if when.exists():
        path, text = json.loads(when.read_text())
        if Path(path).is_dir() or (Path(path).exists() and text in Path(path).read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
    return sample
'''
LEFT_BY_TRAINING = {
    "train.jsonl",
    "eval.jsonl",
    "warm-up.jsonl",
    "curve.png",
    "curve.html",
    "checkpoints",
    "model",
    ".model.tmp",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of `train.toml` and of `run`, which was trained in one go."""
    from rollfeed.cli.main import main

    folder = tmp_path_factory.mktemp("warm-up")
    (folder / "killing_hook.py").write_text(HOOK)
    (folder / "train.toml").write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert main(["train", str(folder / "train.toml"), "--out", str(folder / "run"), "--quiet"]) == 0
        yield folder
    shutil.rmtree(folder)


@pytest.fixture
def kill_when(trained: Path) -> Iterator[Callable[[Path, str], None]]:
    """Return a function that says at what a process of these tests dies; gone at the end."""
    yield lambda path, text: (trained / "kill_when.json").write_text(json.dumps([str(path), text]))
    (trained / "kill_when.json").unlink(missing_ok=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all that a run has written line by line, without times."""
    return {
        name: [{key: value for key, value in line.items() if key != "seconds"} for line in lines(out / name)]
        for name in ("warm-up.jsonl", "train.jsonl", "eval.jsonl")
    }


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_training_begins_where_the_warm_up_ended(trained: Path) -> None:
    found = results(trained / "run")
    warm_up = found["warm-up.jsonl"]
    assert [line["updates"] for line in warm_up] == [10 * number for number in range(len(warm_up))]
    assert warm_up[0]["loss"] is None
    assert warm_up[-1]["loss"] < warm_up[1]["loss"]
    accuracies = [line["accuracy"] for line in warm_up]
    assert max(accuracies[:-1]) < STOP_ACCURACY <= accuracies[-1]
    assert all(line["num_prompts"] == NUM_PROMPTS for line in warm_up)
    # Two shares of 200 samples of one policy, here 25 of each of eight words, there as they were drawn: three standard
    # errors of the difference are 0.15.
    evaluations = found["eval.jsonl"]
    assert [line["step"] for line in evaluations] == [0, 2, 4]
    assert evaluations[0]["accuracy"] == pytest.approx(accuracies[-1], abs=0.17)
    assert evaluations[0]["policy_versions"] == [0, 0]
    kept = sorted(path.name for path in (trained / "run" / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000003", "warm-up"]


def test_the_divergence_is_from_the_model_after_the_warm_up(trained: Path) -> None:
    divergences = [step["train/reference_kl"] for step in results(trained / "run")["train.jsonl"]]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert all(0.0 < divergence < 0.3 for divergence in divergences[1:])


def test_a_warm_up_is_made_again_when_it_is_killed_and_not_when_the_training_after_it_is(
    rollfeed, start_rollfeed, trained: Path, kill_when, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    kill_when(out / "warm-up.jsonl", '"updates": 20,')
    assert start_rollfeed("train", trained / "train.toml", "--out", out).wait() == -signal.SIGKILL
    assert [line["updates"] for line in lines(out / "warm-up.jsonl")] == [0, 10, 20]
    assert not (out / "checkpoints").exists()
    warm_ups = []
    for moment in ("warm-up", "step-000001"):  # in the first evaluation; in the third batch
        kill_when(out / "checkpoints" / moment, "")
        assert start_rollfeed("train", trained / "train.toml", "--out", out).wait() == -signal.SIGKILL
        warm_ups.append((files(out / "checkpoints" / "warm-up"), (out / "warm-up.jsonl").stat().st_mtime_ns))
    assert len(lines(out / "train.jsonl")) == 2
    (trained / "kill_when.json").unlink()
    result = rollfeed("train", trained / "train.toml", "--out", out, "--json")
    assert result.code == 0, result.err
    assert result.json["num_resumed_steps"] == 2
    warm_ups.append((files(out / "checkpoints" / "warm-up"), (out / "warm-up.jsonl").stat().st_mtime_ns))
    assert warm_ups[0] == warm_ups[1] == warm_ups[2]
    assert results(out) == results(trained / "run")


def test_a_warm_up_that_does_not_get_there_fails_and_says_what_to_change(
    rollfeed, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    few = ("--set", "train.warm_up.max_updates=25")
    for _ in range(2):  # the same command tries again, and no better
        result = rollfeed("train", trained / "train.toml", "--out", out, *few)
        assert result.code == 1
        said = [line for line in result.err.splitlines() if line.startswith("rollfeed: ")]
        assert len(said) == 1
        assert "train.warm_up: " in said[0]
        assert "of sampled answers are right after 25 updates, not 40.0%" in said[0]
        assert "lower stop_accuracy or wrong_share, or raise max_updates" in said[0]
        assert [line["updates"] for line in lines(out / "warm-up.jsonl")] == [0, 10, 20, 25]
        assert not (out / "checkpoints").exists()
        assert (out / "train.jsonl").read_text() == (out / "eval.jsonl").read_text() == ""
    assert results(out)["warm-up.jsonl"][:3] == results(trained / "run")["warm-up.jsonl"][:3]


def test_a_label_that_cannot_be_taught_fails_the_run(rollfeed, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(json.dumps({"prompt": "abc", "label": "cba" * 20}) + "\n")
    (tmp_path / "killing_hook.py").write_text(HOOK)
    before, _, after = SETTINGS.partition("[[prompts.environments]]")
    dataset = '[reward]\nrm_type = "exact"\n[[prompts.datasets]]\npath = "words.jsonl"\nlabel_key = "label"\n'
    rest = f"apply_chat_template = false\n[rollout]{after.partition('[rollout]')[2]}"
    (tmp_path / "words.toml").write_text(before + dataset + rest)
    option = ("--set", "train.micro_batch_tokens=50")
    result = rollfeed("train", tmp_path / "words.toml", "--out", tmp_path / "run", *option)
    assert result.code == 1
    assert (
        "train.warm_up: a prompt cannot be taught: train.micro_batch_tokens = 50: sample 0 has 63 tokens" in result.err
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_exported_model_is_as_right_as_the_last_evaluation_found(rollfeed, trained: Path, tmp_path: Path) -> None:
    model = trained / "run" / "model"
    option = ("--set", f"model.checkpoint={model}")
    result = rollfeed("eval", trained / "train.toml", *option, "--out", tmp_path / "eval", "--json")
    assert result.code == 0, result.err
    last = lines(trained / "run" / "eval.jsonl")[-1]
    first = lines(trained / "run" / "eval.jsonl")[0]
    assert last["accuracy"] != first["accuracy"]
    for key in ("accuracy", "num_tokens", "seed"):
        assert result.json[key] == last[key]
    assert result.json["sets"] == last["sets"]


@pytest.fixture
def copy_of_run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, with a warm-up of other numbers and what a kill in its last moment left."""
    copy = shutil.copytree(trained / "run", tmp_path / "copy")
    (copy / ".model.tmp").mkdir()
    (copy / "checkpoints" / "warm-up" / "trainer.safetensors").write_bytes(b"of another run")
    (copy / "warm-up.jsonl").write_text('{"updates": 0}\n')
    assert {path.name for path in copy.iterdir()} >= LEFT_BY_TRAINING
    return copy


def test_overwriting_begins_with_a_new_warm_up(rollfeed, trained: Path, copy_of_run: Path) -> None:
    result = rollfeed("train", trained / "train.toml", "--out", copy_of_run, "--overwrite")
    assert "of the labels wrong on purpose" in result.out
    assert result.code == 0, result.err
    states = [load_file(out / "checkpoints/warm-up/trainer.safetensors") for out in (copy_of_run, trained / "run")]
    assert all((states[0][name] == tensor).all() for name, tensor in states[1].items())
    assert not (copy_of_run / ".model.tmp").exists()
    assert results(copy_of_run) == results(trained / "run")


def test_a_run_that_replaces_a_trained_one_leaves_nothing_of_training(
    rollfeed, trained: Path, copy_of_run: Path
) -> None:
    option = ("--set", "rollout.num_rollout=1")
    result = rollfeed("run", trained / "train.toml", "--out", copy_of_run, "--overwrite", *option)
    assert result.code == 0, result.err
    assert LEFT_BY_TRAINING.isdisjoint(path.name for path in copy_of_run.iterdir())
    assert [path.name for path in (copy_of_run / "batches").iterdir()] == ["step-000000.parquet"]
