"""Our side of ``rollfeed bench client``: the SGLang client with everything that a run has around it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rollfeed.app import open_rollouts
from rollfeed.benchmarks.client_process import PROMPT_TOKENS, ClientJob, Opened, prompt_texts
from rollfeed.config import (
    FilterSettings,
    FiltersSettings,
    PluginSettings,
    RolloutConfig,
    RolloutSettings,
    SamplingSettings,
)
from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.store import RunDirectory
from rollfeed.testing import CharTokenizer, ListSource
from rollfeed.types import Prompt, Sample


@asynccontextmanager
async def open_pipeline(job: ClientJob) -> AsyncIterator[Opened]:
    """Open a run that stores its steps in a temporary directory."""
    num_members = job.n_samples_per_prompt
    config = RolloutConfig(
        seed=job.seed,
        rollout=RolloutSettings(
            rollout_batch_size=job.num_samples // num_members,
            n_samples_per_prompt=num_members,
            max_requests_in_flight=job.in_flight,
        ),
        plugins=PluginSettings(reward=_every_other),
        filters=FiltersSettings(dynamic_sampling=(FilterSettings(name="reward_std"),)),
        sampling=SamplingSettings(rollout_max_response_len=job.tokens),
    )
    engine = ServerEngine(
        SGLang(SGLangSettings(workers=(job.address,), concurrency=job.in_flight)),
        context_length=PROMPT_TOKENS + job.tokens,
        tokenizer=CharTokenizer(),
    )
    with (
        tempfile.TemporaryDirectory(prefix="rollfeed-bench-") as folder,
        RunDirectory.open(Path(folder), settings={}, identity={}, overwrite=False) as directory,
    ):
        rollouts = open_rollouts(
            config,
            source=ListSource(prompt_texts(job.seed), repeat=True),
            engine=engine,
            tokenizer=CharTokenizer(),
            commit=partial(directory.commit, reward_key=None),
        )
        async with rollouts:
            yield Opened(first=rollouts.generate_batch, step=rollouts.generate_batch)


async def _every_other(sample: Sample, prompt: Prompt) -> float:
    """Cost nothing, and leave every group with a spread that its filter keeps."""
    del prompt
    return float(sample.index % 2)
