"""Our SGLang client, the whole pipeline on, beside a client as slime has it, on one server that takes no time.

Where a checkout of slime is given, its own rollout is measured too, in turn with the others.

The server is a process of its own, and so is each client, every time: what is counted is the processor time and
the memory of the process that makes rollouts. The two take turns, so that a machine busy with other work is so
for both.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollfeed.benchmarks.client_process import PROMPT_TOKENS, Client, ClientJob, ProcessUsage
from rollfeed.benchmarks.client_slime import version_of
from rollfeed.benchmarks.machine import command_environment
from rollfeed.errors import ConfigError, RollfeedError
from rollfeed.testing.fake_sglang import start_fake_sglang

GOALS = {
    "cpu_seconds_per_million_tokens": {"1000": 0.85, "8000": 0.6},
    "most_over_least_in_flight": 1.2,
    "ratio_at_8000_tokens": 6.0,
    "bytes_per_token": 16.0,
    "compat_ratio": {"1000": 4.0, "8000": 8.0},
}
_PROGRAM = "from rollfeed.benchmarks.client_process import main; main()"
_MEGABYTE = 1e6
_VOCABULARY = 20_400
"""More than the ids of the fake server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientWorkload:
    """The size of the steps of each client."""

    repetitions: int = 3
    """Of each client in each cell, in turn."""
    repeat_others_up_to: int = 512
    """Requests in flight; with more, where the others take minutes, they are measured once, in the last repetition."""
    samples_per_step: int = 512
    """At least as many as are in flight."""
    min_tokens: int = 4_000_000
    """Our steps are as many as make so many tokens, after a first one."""
    others_min_tokens: int = 1_000_000
    """The same of the others, which are slow."""
    n_samples_per_prompt: int = 8
    prompt_tokens: int = PROMPT_TOKENS
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeCheckout:
    """A checkout of slime, and what runs it."""

    folder: Path
    python: Path = Path(sys.executable)
    """Of an environment that has what slime imports, httpx, msgspec and numpy; all of rollfeed's for ``compat``."""
    compat: bool = False
    """Whether ours in slime's place is measured, too."""


def bench_client(
    *,
    tokens: Sequence[int],
    in_flight: Sequence[int],
    workload: ClientWorkload,
    progress: Callable[[str], None],
    slime: SlimeCheckout | None = None,
) -> dict[str, Any]:
    """Measure every pair of a length and a number in flight, and return JSON values.

    With one pair, its figures are at the top. All cells of a repetition are measured before the next repetition.

    Raises:
        ConfigError: If the reference is not installed, or the checkout is none of slime.
    """
    if find_spec("httpx") is None:
        raise ConfigError("the reference is httpx, which is not installed: pip install httpx")
    version = None if slime is None else version_of(slime.folder)
    pairs = [(length, limit) for length in tokens for limit in in_flight]
    found: dict[tuple[int, int], dict[Client, list[ProcessUsage]]] = {
        pair: {client: [] for client in Client} for pair in pairs
    }
    for repetition in range(workload.repetitions):
        for pair in pairs:
            is_last = repetition == workload.repetitions - 1
            clients = list(Client) if is_last or pair[1] <= workload.repeat_others_up_to else [Client.OURS]
            usages = asyncio.run(_measure(clients, *pair, workload, slime))
            for client, usage in usages.items():
                found[pair][client].append(usage)
            told = ", ".join(f"{client} {_cost(usage):.3f}" for client, usage in usages.items())
            progress(f"{pair[0]} tokens, {pair[1]} in flight: CPU seconds per million tokens: {told}")
    cells = [_cell(*pair, usages) for pair, usages in found.items()]
    by_tokens = {length: [cell for cell in cells if cell["tokens"] == length] for length in tokens}
    return {
        **(cells[0] if len(cells) == 1 else {"cells": cells}),
        "most_over_least_in_flight": {str(length): _spread(row) for length, row in by_tokens.items()},
        "goals": GOALS,
        "workload": asdict(workload),
        "seed": workload.seed,
        "slime": version,
    }


async def _measure(
    clients: Sequence[Client], tokens: int, in_flight: int, workload: ClientWorkload, slime: SlimeCheckout | None
) -> dict[Client, ProcessUsage]:
    num_members = workload.n_samples_per_prompt
    num_samples = math.ceil(max(workload.samples_per_step, in_flight) / num_members) * num_members
    with tempfile.TemporaryDirectory(prefix="rollfeed-bench-") as tokenizer:
        save_tokenizer(Path(tokenizer))
        async with start_fake_sglang(mode="zero", router="new") as fakes:
            # The others go through a router, as slime does.
            addresses = {Client.OURS: fakes.addresses[0]}

            def job_of(client: Client) -> ClientJob:
                is_ours = client in (Client.OURS, Client.COMPAT)
                min_tokens = workload.min_tokens if is_ours else workload.others_min_tokens
                return ClientJob(
                    client=client,
                    address=addresses.get(client, fakes.address),
                    tokens=tokens,
                    in_flight=in_flight,
                    num_samples=num_samples,
                    num_steps=math.ceil(min_tokens / (num_samples * tokens)),
                    n_samples_per_prompt=num_members,
                    seed=workload.seed,
                    slime="" if slime is None else str(slime.folder.resolve()),
                    tokenizer=tokenizer,
                )

            usages: dict[Client, ProcessUsage] = {}
            for client in clients:
                if client not in (Client.SLIME, Client.COMPAT):
                    usages[client] = await _run(job_of(client))
                elif slime is not None and (client is Client.SLIME or slime.compat):
                    usages[client] = await _run(job_of(client), python=slime.python)
            return usages


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer that takes a character for a token, and knows all tokens of the fake server."""
    vocabulary = {chr(32 + number): number for number in range(_VOCABULARY)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.Fuse()
    loadable: Any = PreTrainedTokenizerFast
    loadable(tokenizer_object=made, eos_token=chr(31 + _VOCABULARY)).save_pretrained(folder)
    (folder / "config.json").write_text(f'{{"model_type": "llama", "vocab_size": {_VOCABULARY}}}')


async def _run(job: ClientJob, *, python: Path = Path(sys.executable)) -> ProcessUsage:
    process = await asyncio.create_subprocess_exec(
        str(python),
        "-c",
        _PROGRAM,
        msgspec.json.encode(job).decode(),
        stdout=asyncio.subprocess.PIPE,
        env=command_environment(),
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RollfeedError(f"the {job.client} client's process ended with code {process.returncode}")
    return msgspec.json.decode(output, type=ProcessUsage)


def _cell(tokens: int, in_flight: int, usages: Mapping[Client, Sequence[ProcessUsage]]) -> dict[str, Any]:
    """Return the figures of one length of response and one number of requests in flight: medians over the repetitions.

    Memory is above that of the process before the steps: a step's samples, their replies and what is being stored.
    ``bytes_per_token`` is of the arrays that buffered samples keep. Those of slime are None where no checkout is given.
    """
    cell: dict[str, Any] = {"tokens": tokens, "in_flight": in_flight}
    prefixes = {Client.OURS: "", Client.REFERENCE: "reference_", Client.SLIME: "slime_", Client.COMPAT: "compat_"}
    for client, prefix in prefixes.items():
        found = usages[client]
        costs = tuple(map(_cost, found))
        cell |= {
            f"{prefix}cpu_seconds_per_million_tokens": median(costs) if found else None,
            f"{prefix}samples_per_second": median(u.num_samples / u.wall_seconds for u in found) if found else None,
            f"{prefix}peak_memory_mb": median(u.peak_bytes for u in found) / _MEGABYTE if found else None,
            f"{prefix}cpu_seconds_per_million_tokens_by_repetition": costs,
        }
    ours, reference, slime, compat = (cell[f"{each}cpu_seconds_per_million_tokens"] for each in prefixes.values())
    return {
        **cell,
        "ratio": reference / ours,
        "slime_ratio": slime and slime / ours,
        "compat_ratio": slime and compat and slime / compat,
        "reference_over_slime": slime and reference / slime,
        "bytes_per_token": median(usage.array_bytes / usage.array_tokens for usage in usages[Client.OURS]),
    }


def _cost(usage: ProcessUsage) -> float:
    return usage.cpu_seconds / usage.num_tokens * 1e6


def _spread(cells: Sequence[Mapping[str, Any]]) -> float:
    costs: list[float] = [cell["cpu_seconds_per_million_tokens"] for cell in cells]
    return max(costs) / min(costs)
