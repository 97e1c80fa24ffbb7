"""The work of a run of ``rollfeed bench chaos``: a folder with settings, prompts, a tokenizer and functions.

The prompts end with the last step: every prompt is either trained or dropped by the filter, which ones is known
beforehand, and a lost one leaves the last step short. The last prompts of an epoch are all kept, so that none that is
to be dropped is still waiting when the last batch is full.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SETTINGS, RUN, UNBROKEN = "chaos.toml", "run", "unbroken"
UNBROKEN_AGENT = f"plugins.generate=chaos_agent:{UNBROKEN}"
NUM_CALLS = 2
"""Of a tool, in each episode of an agent."""
DONE, LOST = " done ", " lost "
"""What the agent is told: the tool's answer, or that a killed process has called it and its answer is not known."""
_BATCH_SIZE, _GROUP_SIZE, _OVER_SAMPLING = 4, 4, 8
_NUM_EPOCHS = 5
_STEPS_PER_KILL, _LEAST_STEPS = 5, 30
_END = "<|end|>"
_EFFECTS = "effects"

_ENVIRONMENTS = """
[prompts.adaptive]
environment_list = ["core/add_numbers", "core/copy_text", "core/sort_numbers"]
apply_chat_template = false

[reward]
override_environments = true
"""
_DATASET = """
[[prompts.datasets]]
path = "prompts.jsonl"
label_key = "label"
apply_chat_template = false
"""

_REWARD_OF_LEVELS = '''"""Levels up to 2 are mostly solved, harder ones hardly ever; equal rewards are dropped."""

import time
import zlib

from rollfeed.types import Verdict


def score(sample, prompt):
    time.sleep(0.002)
    if zlib.crc32(prompt.prompt_id.encode()) % 3:
        return Verdict.graded(prompt.metadata["level"] <= 2)
    return Verdict.graded(sample.index % 2 == 1)
'''

_REWARD = '''"""Every second response of a prompt is right, or all are: then a filter drops the prompt."""

import time


def score(sample, prompt):
    time.sleep(0.002)  # as if there was something to compute, so that a kill may come in between
    return 1.0 if prompt.label == "alike" else float(sample.index % 2)
'''

_AGENT = '''"""Three turns with a tool between them; each call leaves a line in a file that is no part of the run."""

import asyncio
from functools import partial
from pathlib import Path

from rollfeed.generate import Episode
from rollfeed.types import FinishKind


async def play(request, *, services, file):
    episode = Episode(request, services)
    for call in range({num_calls}):
        turn = await episode.sample()
        if turn.finish_reason.kind is not FinishKind.STOP:
            return episode.end(turn)
        line = f"{{request.prompt.prompt_id}} {{request.index % {group_size}}} {{call}}"
        answer = await episode.call("append", line, partial(append, file, line), if_lost="{lost}")
        episode.tell(answer)
    return episode.end(await episode.sample())


async def append(file, line):
    with Path(__file__).with_name(file).open("ab", buffering=0) as opened:
        opened.write(f"{{line}}\\n".encode())
    await asyncio.sleep(0.05)  # so that a kill may come between what is done and its answer
    return "{done}"


{run} = partial(play, file="{run}.{effects}")
{unbroken} = partial(play, file="{unbroken}.{effects}")
'''

_SETTINGS = """seed = {seed}

[model]
checkpoint = {model}

[prompts]
num_epoch = {num_epochs}
{source}
[rollout]
mode = "{mode}"
deterministic = {deterministic}
num_rollout = {num_steps}
rollout_batch_size = {batch_size}
n_samples_per_prompt = {group_size}
over_sampling_batch_size = {over_sampling}
refill_granularity = 1
group_failure = "retry"
failure_retries = 50
failure_budget = 1.0

[sampling]
rollout_max_response_len = 512

[engine]
context_length = 1024

[engine.sglang]
workers = {addresses}
concurrency = 32
max_tries = 100
probe_interval_seconds = 0.5
probe_timeout_seconds = 2.0

[reward.workers]
num_workers = 1

[[filters.dynamic_sampling]]
name = "reward_std"

[plugins]
reward = "chaos_reward:score"
"""
_GENERATE = 'generate = "chaos_agent:{name}"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosJob:
    """A folder, and what a run of its settings must come to."""

    folder: Path
    num_steps: int
    batch_size: int
    group_size: int
    kept_ids: frozenset[str]
    """Of prompts that must be trained, epochs included."""
    dropped_ids: frozenset[str]
    """Of prompts that the filter must drop."""
    agents: bool = False
    """Whether prompts are answered in several turns with a tool between them."""
    environments: bool = False
    """Whether prompts are problems of environments whose difficulty adapts: which ones is not known beforehand."""


def effects_file(out: Path) -> Path:
    """Return where the tool of a run's agents leaves its lines: prompt, member of the group and number of the call."""
    return out.with_name(f"{out.name}.{_EFFECTS}")


def make_job(
    folder: Path,
    *,
    num_kills: int,
    mode: str,
    deterministic: bool,
    seed: int,
    addresses: Sequence[str],
    agents: bool = False,
    environments: bool = False,
) -> ChaosJob:
    """Write everything that a run needs.

    More kills make a longer run. With ``agents``, prompts are answered in several turns with a tool between them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    least = max(_LEAST_STEPS, _STEPS_PER_KILL * num_kills)
    num_kept = -(-least // _NUM_EPOCHS) * _BATCH_SIZE
    labels = _labels(num_kept)
    rows = [{"prompt": f"Question {row} of {len(labels)}?", "label": label} for row, label in enumerate(labels)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chaos_reward.py").write_text(_REWARD_OF_LEVELS if environments else _REWARD)
    if agents:
        (folder / "chaos_agent.py").write_text(_agent())
    _write_tokenizer(folder / "model")
    job = ChaosJob(
        folder=folder,
        num_steps=num_kept * _NUM_EPOCHS // _BATCH_SIZE,
        batch_size=_BATCH_SIZE,
        group_size=_GROUP_SIZE,
        kept_ids=frozenset() if environments else _prompt_ids(labels, "spread"),
        dropped_ids=frozenset() if environments else _prompt_ids(labels, "alike"),
        agents=agents,
        environments=environments,
    )
    settings = _SETTINGS.format(
        seed=seed,
        model=json.dumps(str(folder / "model")),
        num_epochs=_NUM_EPOCHS,
        source=_ENVIRONMENTS if environments else _DATASET,
        mode=mode,
        deterministic=json.dumps(deterministic),
        num_steps=job.num_steps,
        batch_size=job.batch_size,
        group_size=job.group_size,
        # What a synchronous step aborts is answered from the beginning, tools and all: agents leave it nothing.
        over_sampling=_BATCH_SIZE if agents and mode == "sync" else _OVER_SAMPLING,
        addresses=json.dumps(list(addresses)),
    )
    (folder / SETTINGS).write_text(settings + (_GENERATE.format(name=RUN) if agents else ""))
    return job


def _agent() -> str:
    names = {"run": RUN, "unbroken": UNBROKEN, "effects": _EFFECTS}
    return _AGENT.format(num_calls=NUM_CALLS, group_size=_GROUP_SIZE, lost=LOST, done=DONE, **names)


def _labels(num_kept: int) -> list[str]:
    """Return a label a row: after every third prompt that is kept comes one that is not, but for the last ones.

    Those are as many as may be under way at once, twice over.
    """
    labels: list[str] = []
    for number in range(num_kept):
        if number % 3 == 2 and number < num_kept - 2 * _OVER_SAMPLING:
            labels.append("alike")
        labels.append("spread")
    return labels


def _prompt_ids(labels: Sequence[str], wanted: str) -> frozenset[str]:
    rows = [row for row, label in enumerate(labels) if label == wanted]
    return frozenset(f"prompts/{row}@e{epoch}" for row in rows for epoch in range(_NUM_EPOCHS))


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes, and what makes the folder one of a model: nothing loads the weights."""
    folder.mkdir(exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([_END, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # The fake engines answer with any ids of a usual vocabulary.
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1 << 15}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "model.safetensors").touch()
