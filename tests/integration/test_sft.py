"""`rollout.mode = "sft"` through the command line: rows become samples, and the tiny model learns them."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pyarrow import parquet
from safetensors.numpy import load_file
from tests.conversations.zoo.families import FAMILIES, save
from tests.integration.linting import findings_in

from rollfeed import RunSpec, prepare
from rollfeed.app.training import prepare_warm_up
from rollfeed.conversations import conversation_tokens
from rollfeed.prompts import load_tokenizer

RAW = """
seed = 3

[model]
checkpoint = "tiny"

[model.tiny]
characters = "abcdrev:="
hidden_size = 32
num_layers = 2
num_heads = 2

[[prompts.datasets]]
path = "words.jsonl"
label_key = "label"
apply_chat_template = false

[prompts]
rollout_shuffle = true

[rollout]
mode = "sft"
num_rollout = 6
rollout_batch_size = 8

[engine]
context_length = 32

[train]
threads = 1
checkpoint_interval = 2

[train.optimizer]
learning_rate = 3e-3

[plugins]
sample_hook = "killing_hook:keep"
"""
EVALUATED = """
[sampling]
rollout_max_response_len = 4
rollout_skip_special_tokens = true

[[eval.datasets]]
name = "words"
path = "words.jsonl"
label_key = "label"
rm_type = "exact"
apply_chat_template = false

[engine]
threads = 1
"""
HOOK = """
import os, signal
from pathlib import Path

def keep(sample, prompt):
    when = Path(__file__).with_name("kill_at")
    if when.exists() and sample.group_index == int(when.read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
"""
CHAT = """
[model]
checkpoint = "model"

[[prompts.datasets]]
path = "talks.jsonl"
input_key = "messages"
tools_key = "tools"

[rollout]
mode = "sft"
num_rollout = 2
rollout_batch_size = 2

[engine]
context_length = 1000
"""
TAUGHT = """
[[prompts.environments]]
id = "core/reverse_text"
apply_chat_template = false
parameters = { style = "compact", alphabet_size = 4 }

[rollout]
num_rollout = 1
rollout_batch_size = 2
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 4
rollout_skip_special_tokens = true

[engine]
context_length = 32
threads = 1

[train]
threads = 1

[train.warm_up]
stop_accuracy = 0.02
batch_size = 16
learning_rate = 3e-3
probe_interval = 10
probe_prompts = 100
"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALKS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "3 and 4.", "step_loss_mask": number % 2},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": TOOLS if number else None,
    }
    for number in range(4)
]


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "batches").glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with conversations, settings, and a model of which there is the tokenizer only."""
    save(FAMILIES["qwen2.5"], tmp_path / "model")
    write(tmp_path / "talks.jsonl", TALKS)
    (tmp_path / "talks.toml").write_text(CHAT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with words and their reverse, settings, and `run`, trained in one go."""
    from rollfeed.cli.main import main

    folder, random = tmp_path_factory.mktemp("words"), Random(0)
    drawn = ["".join(random.choices("abcd", k=3)) for _ in range(40)]
    write(folder / "words.jsonl", [{"prompt": f"rev:{word}=", "label": word[::-1]} for word in drawn])
    (folder / "words.toml").write_text(RAW)
    (folder / "killing_hook.py").write_text(HOOK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert main(["train", str(folder / "words.toml"), "--out", str(folder / "run"), "--quiet"]) == 0
        yield folder


def test_rows_become_samples_without_an_engine_or_weights(rollfeed: Callable[..., Any], talks: Path) -> None:
    result = rollfeed("run", "talks.toml", "--out", "run", "--json")
    assert result.code == 0, result.err
    tokenizer = load_tokenizer(talks / "model")
    found = rows_of(talks / "run")
    assert [row["prompt_id"] for row in found] == [f"talks/{number}@e0" for number in range(4)]
    for row, talk in zip(found, TALKS, strict=True):
        ids, mask = conversation_tokens(tokenizer, talk["messages"], tools=talk["tools"])
        length = row["response_length"]
        assert row["token_ids"] == ids.tolist()
        assert length == len(ids) - int(np.argmax(mask))
        assert row["loss_mask"] == mask[-length:].tolist()
        assert not mask[:-length].any()
        assert row["logprobs"] == [0.0] * length
        assert (row["status"], row["advantage"]) == ("completed", 1.0)
    shown = rollfeed("show", "run", "--group", "1", "--json").json
    assert shown["question"] == "Sure?"
    assert shown["samples"][0]["reward"] == 0.0
    assert shown["samples"][0]["trained_tokens"] < shown["samples"][0]["response_length"]
    assert findings_in(talks / "run") == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TALKS[0]["messages"][:2]}, "the conversation has no turn of the assistant that is learned"),
        ({"messages": TALKS[0]["messages"][5:6]}, "the conversation begins with a turn of the assistant"),
        ({"messages": [{"role": "user"}]}, "message 0 of column 'messages' has no content"),
        ({"messages": "hello"}, "the conversation has no turn of the assistant that is learned"),
        ({"messages": []}, "column 'messages' must be a text or a list of messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": "!", "step_loss_mask": 0},
                ]
            },
            "the conversation has no turn of the assistant that is learned",
        ),
    ],
)
def test_a_row_that_teaches_nothing_is_named_or_skipped_and_counted(
    rollfeed: Callable[..., Any], talks: Path, row: dict[str, Any], expected: str
) -> None:
    write(talks / "talks.jsonl", [*TALKS[:2], row, *TALKS[2:]])
    result = rollfeed("check", "talks.toml")
    assert result.code == 2
    assert f"talks.jsonl:3: {expected}" in result.err
    assert len(result.err.strip().splitlines()) == 1
    result = rollfeed("run", "talks.toml", "--out", "run", "--quiet", "--set", "prompts.skip_bad_rows=true")
    assert result.code == 0, result.err
    assert (
        f"1 rows of talks cannot be used and are left out, the first: {talks}/talks.jsonl:3: {expected}" in result.err
    )
    assert {row["prompt_id"] for row in rows_of(talks / "run")} == {f"talks/{n}@e0" for n in (0, 1, 3, 4)}


def test_a_template_that_shows_turns_otherwise_later_needs_a_mask_type(
    rollfeed: Callable[..., Any], talks: Path
) -> None:
    save(FAMILIES["qwen3"], talks / "model")
    thinking = {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nYes."}
    question = {"role": "user", "content": "Is it?"}
    write(talks / "talks.jsonl", [{"messages": [question, thinking, question, thinking], "tools": None}] * 4)
    result = rollfeed("check", "talks.toml")
    assert result.code == 2
    assert (
        "talks.jsonl:1: message 1: the chat template goes on showing the turn otherwise than it was said" in result.err
    )
    result = rollfeed("run", "talks.toml", "--out", "run", "--quiet", "--set", "rollout.loss_mask_type=distill_qwen")
    assert result.code == 0, result.err
    assert all(row["response"].startswith("<think>\nWell.") for row in rows_of(talks / "run"))
    assert findings_in(talks / "run") == []


def test_conversations_over_the_context_are_left_out_and_counted(rollfeed: Callable[..., Any], talks: Path) -> None:
    long = {"messages": [{"role": "user", "content": "a" * 2000}, {"role": "assistant", "content": "b"}], "tools": None}
    write(talks / "talks.jsonl", [long, *TALKS])
    result = rollfeed("run", "talks.toml", "--out", "run", "--quiet")
    assert result.code == 0, result.err
    assert "1 conversations of talks are over context_length = 1000 tokens and are left out" in result.err
    assert {row["prompt_id"] for row in rows_of(talks / "run")} == {f"talks/{n}@e0" for n in (1, 2, 3, 4)}
    result = rollfeed("check", "talks.toml", "--set", "engine.context_length=20")
    assert result.code == 2
    assert "every conversation (5) is longer than context_length; the shortest has" in result.err


def test_a_run_goes_on_only_with_the_answers_it_began_with(rollfeed: Callable[..., Any], talks: Path) -> None:
    assert rollfeed("run", "talks.toml", "--out", "run", "--quiet").code == 0
    changed = [
        {**talk, "messages": [*talk["messages"][:-1], {"role": "assistant", "content": "No."}]} for talk in TALKS
    ]
    write(talks / "talks.jsonl", changed)
    result = rollfeed("run", "--resume", "run", "--step", "0")
    assert result.code == 2
    assert "data set talks: content_digest is" in result.err
    write(talks / "talks.jsonl", TALKS)
    assert rollfeed("run", "--resume", "run", "--step", "0", "--quiet").code == 0
    assert len(rows_of(talks / "run")) == 4


def test_the_loss_is_the_mean_over_learned_tokens(words: Path) -> None:
    records = [json.loads(line) for line in (words / "run/train.jsonl").read_text().splitlines()]
    first = [row for row in rows_of(words / "run") if row["group_index"] < 8]
    checkpoint = next((words / "cache/rollfeed/models").iterdir())
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    losses = []
    for row in first:
        tokens = torch.tensor(row["token_ids"])
        start = len(tokens) - row["response_length"]
        losses.append(
            torch.nn.functional.cross_entropy(
                model(tokens[None]).logits[0, start - 1 : -1], tokens[start:], reduction="none"
            )
        )
    assert records[0]["train/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert records[0]["train/tokens"] == 32
    assert records[-1]["train/loss"] < records[0]["train/loss"]
    assert all(math.isfinite(value) for record in records for value in record.values())
    assert not any("mismatch" in name or "ratio" in name for name in records[0])
    assert (words / "run/model/model.safetensors").exists()


def test_a_training_that_is_killed_goes_on_as_if_it_had_not_been(
    words: Path, tmp_path: Path, start_rollfeed: Callable[..., Any]
) -> None:
    (words / "kill_at").write_text("29")
    out = tmp_path / "run"
    try:
        assert start_rollfeed("train", words / "words.toml", "--out", out).wait() == -signal.SIGKILL
    finally:
        (words / "kill_at").unlink()
    assert (out / "checkpoints/step-000001").is_dir()
    assert start_rollfeed("train", words / "words.toml", "--out", out).wait() == 0
    kept = [
        [{**json.loads(line), "seconds": 0} for line in (each / "train.jsonl").read_text().splitlines()]
        for each in (out, words / "run")
    ]
    assert kept[0] == kept[1]
    assert rows_of(out) == rows_of(words / "run")


def test_what_is_said_of_a_training_has_no_rewards(rollfeed: Callable[..., Any], words: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(words / "cache"))
        result = rollfeed("train", words / "words.toml", "--out", tmp_path / "run", "--set", "rollout.num_rollout=1")
        checked = rollfeed("check", words / "words.toml", "--json").json
    assert result.code == 0, result.err
    assert "step 0: loss 2." in result.out
    assert checked["training"]["loss"]["objective"] == "cross_entropy"


def test_what_a_warm_up_is_taught_is_learned_as_by_the_warm_up(
    rollfeed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in the same order, in batches of as many, at the same rate: the same weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = RAW[: RAW.index("[[prompts.datasets]]")] + TAUGHT
    (tmp_path / "warm-up.toml").write_text(settings)
    prepared = prepare(RunSpec.load(tmp_path / "warm-up.toml"))
    warm_up = asyncio.run(prepare_warm_up(prepared))
    assert warm_up is not None
    result = rollfeed("train", tmp_path / "warm-up.toml", "--out", tmp_path / "warm-up", "--quiet")
    assert result.code == 0, result.err
    num_updates = json.loads((tmp_path / "warm-up/warm-up.jsonl").read_text().splitlines()[-1])["updates"]
    prompts = asyncio.run(warm_up.source.draw(16 * num_updates))
    write(tmp_path / "words.jsonl", [{"prompt": prompt.text, "label": prompt.label} for prompt in prompts])
    (tmp_path / "words.toml").write_text(RAW[: RAW.index("[plugins]")].replace("rollout_shuffle = true", ""))
    sizes = [f"rollout.num_rollout={num_updates}", "rollout.rollout_batch_size=16"]
    options = [option for each in sizes for option in ("--set", each)]
    result = rollfeed("train", tmp_path / "words.toml", "--out", tmp_path / "sft", "--quiet", *options)
    assert result.code == 0, result.err
    taught, learned = (
        load_file(tmp_path / path / "trainer.safetensors")
        for path in ("warm-up/checkpoints/warm-up", f"sft/checkpoints/step-{num_updates - 1:06d}")
    )
    for name, tensor in taught.items():
        if name.startswith("model/"):
            np.testing.assert_allclose(learned[name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)


def test_evaluations_of_a_training_ask_the_model_that_has_learned(
    rollfeed: Callable[..., Any], words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(words / "cache"))
    (tmp_path / "words.jsonl").write_text((words / "words.jsonl").read_text())
    (tmp_path / "words.toml").write_text(RAW[: RAW.index("[plugins]")].replace("[engine]", EVALUATED))
    values = ["rollout.num_rollout=40", "rollout.rollout_batch_size=40", "train.eval_interval=20"]
    options = [option for each in [*values, "train.optimizer.learning_rate=1e-2"] for option in ("--set", each)]
    result = rollfeed("train", tmp_path / "words.toml", "--out", tmp_path / "run", "--quiet", *options)
    assert result.code == 0, result.err
    found = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert [each["policy_versions"] for each in found] == [[0, 0], [20, 20], [40, 40]]
    assert found[0]["sets"]["words"]["accuracy"] < found[2]["sets"]["words"]["accuracy"]
