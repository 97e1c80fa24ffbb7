"""Calls a run's reward function once, on a row of its data, before anything is started."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollfeed import app
from rollfeed.base.printing import keeping_prints
from rollfeed.config import RolloutMode
from rollfeed.errors import ConfigError
from rollfeed.types import Outcome, Prompt, Reward, Rollout, Sample, SampleStatus, VersionSpan

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class TriedReward:
    """The reward of a row whose label is its response, as a function of the user gives it."""

    row: str
    response: str
    has_label: bool
    reward: Reward | None
    printed: list[str]
    """Lines that it printed."""

    def describe(self) -> str:
        named = isinstance(self.reward, dict)
        shown = ", ".join(f"{name} {value:g}" for name, value in self.reward.items()) if named else f"{self.reward:g}"  # type: ignore[union-attr]
        text = self.response if len(self.response) <= _SHOWN_CHARACTERS else f"{self.response[:_SHOWN_CHARACTERS]} ..."
        of = f"the label of {self.row} as its response ({text!r})" if self.has_label else f"no response to {self.row}"
        return f"{shown} for {of}"


def try_reward(prepared: app.PreparedRun) -> TriedReward | None:
    """Call the function that scores the first row of a data set, with its label as the response.

    Returns:
        None where no function of the user scores it by itself: there is no data set, or the function is slime's,
        or gets samples that a function of the user has made, whose metadata nobody knows.

    Raises:
        ConfigError: If it gives no reward, with what it raised.
    """
    config = prepared.settings
    prompt = next(iter(prepared.dataset_prompts), None)
    if prompt is None or config.rollout.mode is RolloutMode.SFT or prepared.functions.slime is not None:
        return None
    if config.plugins.generate or config.plugins.rollout:
        return None
    if not config.plugins.has_reward and prompt.metadata.get("reward_fn") is None:
        return None
    label = prompt.label
    response = "" if label is None else label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)
    is_group = config.plugins.group_reward is not None or config.plugins.batched_reward is not None
    rollouts = _rollouts(prepared, prompt, response, config.rollout.n_samples_per_prompt if is_group else 1)

    workers = prepared.functions.services.workers
    with tempfile.TemporaryDirectory(prefix="rollfeed-check-") as folder:
        output = workers.output = Path(folder, "printed")

        async def score() -> Any:
            with keeping_prints(output):
                async with workers:
                    return await prepared.functions.scorer.score(rollouts, prompt)

        verdict = asyncio.run(score())[0]
        printed = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    row = prompt.prompt_id
    if verdict.outcome is not Outcome.OK:
        said = f"; it printed {printed[-1]!r:.200}" if printed else ""
        raise ConfigError(f"{verdict.detail}: called with row {row} and its label as the response{said}")
    return TriedReward(row, response, label is not None, verdict.reward, printed)


def _rollouts(prepared: app.PreparedRun, prompt: Prompt, response: str, count: int) -> list[Rollout]:
    ids = prepared.model.tokenizer.encode(response, add_special_tokens=False)
    sample = Sample(
        token_ids=np.concatenate([prompt.token_ids, ids]),
        response_length=len(ids),
        loss_mask=np.ones(len(ids), np.float32),
        logprobs=np.zeros(len(ids), np.float32),
        version_spans=(VersionSpan(0, len(ids), 0),) if len(ids) else (),
        status=SampleStatus.COMPLETED,
        group_index=0,
        index=0,
        rollout_id=0,
        response=response,
        label=prompt.label,
        metadata=prompt.metadata,
    )
    return [Rollout(rollout_id=number, samples=(sample,)) for number in range(count)]
