"""The process that ``rollfeed bench client`` measures: one client, a workload, and what it took.

Each client runs in a process of its own, so that the memory and the processor time of one are not those
of the other. What it is to do comes as JSON in the first argument; the figures go to standard output.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

if TYPE_CHECKING:
    from rollfeed.types import TrainBatch

PROMPT_TOKENS = 150
_NUM_PROMPTS = 64
_STATUS = Path("/proc/self/status")
_CLEAR_PEAK = Path("/proc/self/clear_refs")

Step: TypeAlias = Callable[[], Awaitable[Any]]
"""Makes all samples of a step and returns them."""


class Opened(NamedTuple):
    """A client that may be measured."""

    first: Step
    """Opens all connections."""
    step: Step


class Client(StrEnum):
    """A client that asks the server."""

    OURS = "ours"
    """The SGLang client under the whole pipeline: ledger, reward, filter, batch, store and metrics."""
    REFERENCE = "reference"
    """httpx, its ``json()`` and lists, and nothing around them."""
    SLIME = "slime"
    """The rollout of a checkout of slime, which does the same."""
    COMPAT = "compat"
    """Ours in slime's place, ``rollfeed.compat.slime_rollout``: its arguments, and its samples filled."""


class ClientJob(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one process."""

    client: Client
    address: str
    tokens: int
    """Of every response."""
    in_flight: int
    """Requests at the server at once, at most."""
    num_samples: int
    """Of a step."""
    num_steps: int
    n_samples_per_prompt: int
    seed: int
    tokenizer: str
    """Folder of a tokenizer that takes a character for a token."""
    slime: str = ""
    """Folder of the checkout."""


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of all steps together, without the start of the process and the first step."""

    num_samples: int
    num_tokens: int
    cpu_seconds: float
    """Of the process: all its threads, user and system."""
    wall_seconds: float
    peak_bytes: int = 0
    """The most resident memory, above what was resident before the first step."""
    array_bytes: int = 0
    """Of the arrays that the samples of the last step keep in memory; 0 where there are none."""
    array_tokens: int = 0
    """Response tokens of those samples."""


def main() -> None:
    """Do the job and print what it took."""
    job = msgspec.json.decode(sys.argv[1], type=ClientJob)
    print(msgspec.json.encode(asyncio.run(_run(job))).decode(), flush=True)


def prompt_texts(seed: int) -> list[str]:
    """Return prompts of ``PROMPT_TOKENS`` characters, each of which is a token."""
    return [f"Question {seed}.{number}: ".ljust(PROMPT_TOKENS, "x") for number in range(_NUM_PROMPTS)]


async def _run(job: ClientJob) -> ProcessUsage:
    opened = _opened(job.client)
    # A small run before, in which everything is imported.
    small = msgspec.structs.replace(job, tokens=16, num_samples=4 * job.n_samples_per_prompt)
    async with opened(small) as client:
        await client.step()
    async with opened(job) as client:
        base = _restart_peak_bytes()
        await client.first()
        usage = await _measured(job, client.step)
        return msgspec.structs.replace(usage, peak_bytes=peak_bytes() - base)


async def _measured(job: ClientJob, step: Step) -> ProcessUsage:
    """Measure the steps; what one of them returned lives until the next one begins, as with a trainer."""
    cpu_before, started = time.process_time(), time.perf_counter()
    kept: Any = None
    for _ in range(job.num_steps):
        kept = None
        kept = await step()
    cpu_seconds, wall_seconds = time.process_time() - cpu_before, time.perf_counter() - started
    num_samples = job.num_samples * job.num_steps
    array_bytes, array_tokens = array_sizes(kept) if job.client is Client.OURS else (0, 0)
    return ProcessUsage(
        num_samples=num_samples,
        num_tokens=num_samples * job.tokens,
        cpu_seconds=cpu_seconds,
        wall_seconds=wall_seconds,
        array_bytes=array_bytes,
        array_tokens=array_tokens,
    )


def array_sizes(batch: TrainBatch) -> tuple[int, int]:
    """Return the bytes that the arrays of a batch keep in memory, and its response tokens.

    A view counts as all that it is a view of; what several share counts once.
    """
    owners: dict[int, int] = {}
    for sample in batch.samples:
        for array in (sample.token_ids, sample.loss_mask, sample.logprobs):
            owner: Any = array
            while isinstance(owner, np.ndarray) and owner.base is not None:
                owner = owner.base
            owners[id(owner)] = owner.nbytes if isinstance(owner, np.ndarray | memoryview) else len(owner)
    return sum(owners.values()), sum(sample.response_length for sample in batch.samples)


def _opened(client: Client) -> Callable[[ClientJob], AbstractAsyncContextManager[Opened]]:
    # Fetched here, so that each process has only what its client needs.
    if client is Client.OURS:
        from rollfeed.benchmarks.client_pipeline import open_pipeline

        return open_pipeline
    if client in (Client.SLIME, Client.COMPAT):
        from rollfeed.benchmarks.client_slime import open_compat, open_slime

        return open_slime if client is Client.SLIME else open_compat
    return _reference


@dataclass(slots=True)
class _Sample:
    """An answer as a trainer is given it, every token of it an object."""

    prompt: str
    index: int
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    status: str = ""
    reward: float | None = None


@asynccontextmanager
async def _reference(job: ClientJob) -> AsyncIterator[Opened]:
    """Open a client as slime has it: one pool of connections, a task for each sample and one for each group."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(job.tokenizer, local_files_only=True)
    texts, members = prompt_texts(job.seed), job.n_samples_per_prompt
    http, permits = _http(job.in_flight), asyncio.Semaphore(job.in_flight)

    async def answer(sample: _Sample, params: dict[str, Any]) -> _Sample:
        async with permits:
            sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
            body = {"sampling_params": params, "return_logprob": True, "input_ids": sample.tokens}
            response = await http.post(f"{job.address}/generate", json=body)
            response.raise_for_status()
            reply = response.json()
            sampled = reply["meta_info"]["output_token_logprobs"]
            sample.tokens = sample.tokens + [token[1] for token in sampled]
            sample.logprobs += [token[0] for token in sampled]
            sample.loss_mask += [1] * len(sampled)
            sample.response_length += len(sampled)
            sample.response += reply["text"]
            sample.status = reply["meta_info"]["finish_reason"]["type"]
        sample.reward = float(sample.index % 2)
        return sample

    async def answer_group(group: int, params: dict[str, Any]) -> list[_Sample]:
        text = texts[group % len(texts)]
        samples = [_Sample(text, group * members + member) for member in range(members)]
        return await asyncio.gather(*(asyncio.create_task(answer(sample, {**params})) for sample in samples))

    async def step(tokens: int) -> list[list[_Sample]]:
        params = {"max_new_tokens": tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "no_stop_trim": True}
        pending = {asyncio.create_task(answer_group(group, params)) for group in range(job.num_samples // members)}
        groups: list[list[_Sample]] = []
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            groups += [task.result() for task in done]
        return groups

    yield Opened(first=partial(step, 16), step=partial(step, job.tokens))


@cache
def _http(max_connections: int) -> Any:
    """Return the one client of this process: whether its pool has idle connections decides what a request costs."""
    import httpx

    limits = httpx.Limits(max_connections=max_connections)
    return httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None), trust_env=False)


def _restart_peak_bytes() -> int:
    """Forget the peak so far, where that can be done, and return what is resident now."""
    if not _STATUS.exists():
        return peak_bytes()
    _CLEAR_PEAK.write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
