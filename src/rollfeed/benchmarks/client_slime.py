"""A checkout of slime in ``rollfeed bench client``: its own rollout, or ours in its place, on the bench's server.

Nothing of it is replaced. What its rollout asks of a trainer's arguments is given here where it is needed, and is None
elsewhere, which turns its features off.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollfeed.benchmarks.client_process import PROMPT_TOKENS, ClientJob, Opened, prompt_texts
from rollfeed.errors import ConfigError

_ROLLOUT = Path("slime", "rollout", "sglang_rollout.py")


class _Arguments(Namespace):
    """Arguments of a trainer, of which those that nobody gave are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


_arguments = _Arguments()
"""Of this process, as slime has them: its state keeps the first that it sees."""


def version_of(checkout: Path) -> dict[str, str]:
    """Return which slime a folder holds: its commit, or a hash of its files where there is no repository.

    Raises:
        ConfigError: If it is no checkout of slime.
    """
    if not (checkout / _ROLLOUT).is_file():
        raise ConfigError(f"--slime {checkout}: no checkout of slime: it has no {_ROLLOUT}")
    if (checkout / ".git").exists():
        asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return {"commit": found.stdout.strip()}
    digest = hashlib.sha256()
    for file in sorted((checkout / "slime").rglob("*.py")):
        digest.update(f"{file.relative_to(checkout)}\0".encode() + file.read_bytes() + b"\0")
    return {"files_sha256": digest.hexdigest()}


class _Source:
    """Groups of slime's samples, without end."""

    def __init__(self, job: ClientJob, sample: Any) -> None:
        self._sample, self._size, self._texts = sample, job.n_samples_per_prompt, prompt_texts(job.seed)
        self._groups = count()

    def get_samples(self, num_groups: int) -> list[list[Any]]:
        """Return so many."""
        return [self._group(next(self._groups)) for _ in range(num_groups)]

    def _group(self, group: int) -> list[Any]:
        text, first = self._texts[group % len(self._texts)], group * self._size
        return [self._sample(group_index=group, index=first + member, prompt=text) for member in range(self._size)]


def _prepared(job: ClientJob) -> _Source:
    """Make the checkout importable and the arguments those of a job; return what gives its samples."""
    os.environ["TQDM_DISABLE"] = "1"
    if job.slime not in sys.path:
        sys.path.insert(0, job.slime)
    num_members, router = job.n_samples_per_prompt, urlsplit(job.address)
    given = {
        "hf_checkpoint": job.tokenizer,
        "sglang_router_ip": router.hostname,
        "sglang_router_port": router.port,
        "sglang_server_concurrency": job.in_flight,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "rollout_num_engines": 1,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_global_dataset": True,
        "rollout_batch_size": job.num_samples // num_members,
        "over_sampling_batch_size": job.num_samples // num_members,
        "n_samples_per_prompt": num_members,
        "custom_rm_path": f"{__name__}.every_other",
    }
    vars(_arguments).update(given)
    return _Source(job, importlib.import_module("slime.utils.types").Sample)


@asynccontextmanager
async def open_slime(job: ClientJob) -> AsyncIterator[Opened]:
    """Open the rollout of the checkout that the job names."""
    source = _prepared(job)
    rollout = importlib.import_module("slime.rollout.sglang_rollout")
    importlib.import_module("slime.utils.http_utils").init_http_client(_arguments)

    async def step(tokens: int) -> Any:
        _arguments.rollout_max_response_len = tokens
        rollout.GenerateState(_arguments).sampling_params["max_new_tokens"] = tokens
        output, _ = await rollout.generate_rollout_async(_arguments, 0, source.get_samples)
        return output.samples

    yield Opened(first=partial(step, 16), step=partial(step, job.tokens))


@asynccontextmanager
async def open_compat(job: ClientJob) -> AsyncIterator[Opened]:
    """Open ours as a process of that slime calls it."""
    source = _prepared(job)
    ours = importlib.import_module("rollfeed.compat.slime_rollout").generate_rollout
    _arguments.rollout_max_context_len = PROMPT_TOKENS + job.tokens

    async def step(tokens: int) -> Any:
        _arguments.rollout_max_response_len = tokens
        return (await asyncio.to_thread(ours, _arguments, 0, source)).samples

    yield Opened(first=partial(step, 16), step=partial(step, job.tokens))


async def every_other(args: Any, sample: Any, **options: Any) -> float:
    """Score a sample, as :func:`rollfeed.benchmarks.client_pipeline` does."""
    del args, options
    return float(sample.index % 2)
