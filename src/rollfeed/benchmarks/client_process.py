"""The process that ``rollfeed bench client`` measures: one client, a workload, and what it took.

Each client runs in a process of its own, so that the memory and the processor time of one are not those
of the other. What it is to do comes as JSON in the first argument; the figures go to standard output.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from rollfeed.testing import CharTokenizer
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
    """Who asks the server."""

    OURS = "ours"
    """The SGLang client under the whole pipeline: ledger, reward, filter, batch, store and metrics."""
    REFERENCE = "reference"
    """httpx, its ``json()`` and lists, and nothing around them."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to do."""

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


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps together took, without the start of the process and the first step."""

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
    job = msgspec.json.decode(sys.argv[1], type=Job)
    print(msgspec.json.encode(asyncio.run(_run(job))).decode(), flush=True)


def prompt_texts(seed: int) -> list[str]:
    """Return prompts of ``PROMPT_TOKENS`` characters, each of which is a token."""
    return [f"Question {seed}.{number}: ".ljust(PROMPT_TOKENS, "x") for number in range(_NUM_PROMPTS)]


async def _run(job: Job) -> Usage:
    opened = _ours() if job.client is Client.OURS else _reference
    # A small run before, in which everything is imported.
    small = msgspec.structs.replace(job, tokens=16, num_samples=4 * job.n_samples_per_prompt)
    async with opened(small) as client:
        await client.step()
    async with opened(job) as client:
        base = _restart_peak_bytes()
        await client.first()
        usage = await _measured(job, client.step)
        return msgspec.structs.replace(usage, peak_bytes=_peak_bytes() - base)


async def _measured(job: Job, step: Step) -> Usage:
    """Measure the steps; what one of them returned lives until the next one begins, as with a trainer."""
    cpu_before, started = time.process_time(), time.perf_counter()
    kept: Any = None
    for _ in range(job.num_steps):
        kept = None
        kept = await step()
    cpu_seconds, wall_seconds = time.process_time() - cpu_before, time.perf_counter() - started
    num_samples = job.num_samples * job.num_steps
    array_bytes, array_tokens = array_sizes(kept) if isinstance(kept, TrainBatch) else (0, 0)
    return Usage(
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


def _ours() -> Callable[[Job], AbstractAsyncContextManager[Opened]]:
    # Fetched here, so that the reference's process has only what it needs.
    from rollfeed.benchmarks.client_pipeline import open_pipeline

    return open_pipeline


@asynccontextmanager
async def _reference(job: Job) -> AsyncIterator[Opened]:
    """Open a client as it is written in an afternoon: one pool of connections, and every token an object."""
    import httpx

    limits = httpx.Limits(max_connections=job.in_flight, max_keepalive_connections=job.in_flight)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as http:
        permits = asyncio.Semaphore(job.in_flight)
        prompts = [CharTokenizer().encode(text, add_special_tokens=False).tolist() for text in prompt_texts(job.seed)]

        async def answer(number: int, tokens: int) -> dict[str, Any]:
            prompt: Sequence[int] = prompts[number // job.n_samples_per_prompt % len(prompts)]
            body = {
                "rid": str(number),
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": number},
                "return_logprob": True,
            }
            async with permits:
                response = await http.post(f"{job.address}/generate", json=body)
            response.raise_for_status()
            reply = response.json()
            sampled = reply["meta_info"]["output_token_logprobs"]
            return {
                "tokens": [*prompt, *(token[1] for token in sampled)],
                "logprobs": [token[0] for token in sampled],
                "loss_mask": [1] * len(sampled),
                "response": reply["text"],
                "status": reply["meta_info"]["finish_reason"]["type"],
                "reward": float(number % 2),
            }

        async def step(tokens: int) -> list[dict[str, Any]]:
            return await asyncio.gather(*(answer(number, tokens) for number in range(job.num_samples)))

        yield Opened(first=partial(step, 16), step=partial(step, job.tokens))


def _restart_peak_bytes() -> int:
    """Forget the peak so far, where that can be done, and return what is resident now."""
    if not _STATUS.exists():
        return _peak_bytes()
    _CLEAR_PEAK.write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
