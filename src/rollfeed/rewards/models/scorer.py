"""The grader ``reward_model``: a model's score of prompt and response is the reward.

Invariant: what the model cannot score, or has not in time, is a failed verdict; never a reward of 0, and never a score
of other tokens than those that it is said to be of.

Axes: S scored places, C labels.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.reward_model import Activation, Aggregate, RewardInput, RewardModelSettings, ScoredUnit
from rollfeed.errors import ConfigError, RewardError
from rollfeed.model_files import classified_unit, find_config, label_names
from rollfeed.protocols import Tokenizer, Workers
from rollfeed.rewards.models.inputs import InputBuilder
from rollfeed.rewards.models.local_model import LocalRewardModel, Logits
from rollfeed.rewards.models.served_model import ServedRewardModel
from rollfeed.types import Prompt, Sample, Verdict


class RewardModelScorer:
    """Scores samples with the model of ``[reward.model]``. Entered with ``async with``, which ends what it started.

    Args:
        settings: ``[reward.model]``.
        folder: Of the checkpoint.
        tokenizer: Of the model.
        workers: Of a model that is loaded here; they have the device and the memory for it.
        is_policys: Whether vocabulary and chat template are the policy's.
        alone: Every text goes through a model that is loaded here alone, so that equal runs have equal rewards.

    Raises:
        ConfigError: If the folder is no classifier's, labels or units do not fit it, or tokens as they were sampled are
            wanted from another vocabulary.
    """

    def __init__(
        self,
        settings: RewardModelSettings,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        workers: Workers,
        is_policys: bool,
        alone: bool,
    ) -> None:
        self._settings = settings
        labels = check_classifier(folder, settings)
        self._label = 0 if settings.label is None else settings.label
        self._activation = settings.activation
        if self._activation is Activation.AUTO:
            self._activation = Activation.NONE if len(labels) == 1 else Activation.SOFTMAX
        length = (find_config(folder) or {}).get("max_position_embeddings")
        self._inputs = InputBuilder(
            settings,
            tokenizer,
            takes_sampled_ids=is_policys and not settings.sends_text,
            max_length=length if isinstance(length, int) else None,
        )
        self.model: LocalRewardModel | ServedRewardModel = (
            ServedRewardModel(settings, labels=labels)
            if settings.servers
            else LocalRewardModel(folder, settings, workers=workers, alone=alone)
        )

    async def __aenter__(self) -> RewardModelScorer:
        self._entered = AsyncExitStack()
        await self._entered.enter_async_context(self.model)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._entered.aclose()

    async def __call__(self, sample: Sample, prompt: Prompt) -> Verdict:
        """Return the model's score of an answer; ERROR or TIMEOUT with the cause where there is none."""
        try:
            text = await asyncio.to_thread(self._inputs.build, sample, prompt)
        except (RewardError, ConfigError) as error:
            return Verdict.failed(f"reward model: {error}")
        found = await self.model.logits(text)
        if isinstance(found, Verdict):
            return Verdict.failed(f"reward model: {found.detail}", found.outcome)
        scores_S = self._scores(found)
        if not np.isfinite(scores_S).all():
            return Verdict.failed("reward model: a score is not finite")
        if self._settings.unit is ScoredUnit.RESPONSE:
            return Verdict(reward=float(scores_S[-1]))
        return Verdict(reward=aggregated(scores_S, self._settings.aggregate), step_scores=tuple(scores_S.tolist()))

    def _scores(self, logits: Logits) -> NDArray[np.float64]:
        logits_SC = np.asarray(logits, np.float64)
        if self._activation is Activation.SOFTMAX:
            shifted_SC = np.exp(logits_SC - logits_SC.max(axis=1, keepdims=True))
            return np.asarray(shifted_SC[:, self._label] / shifted_SC.sum(axis=1))
        scores_S = logits_SC[:, self._label]
        if self._activation is Activation.SIGMOID:
            return np.asarray(np.exp(-np.logaddexp(0.0, -scores_S)))
        return scores_S


def aggregated(scores_S: NDArray[np.float64], how: Aggregate) -> float:
    """Return the reward that the scores of steps or tokens make."""
    match how:
        case Aggregate.MIN:
            return float(scores_S.min())
        case Aggregate.MEAN:
            return float(scores_S.mean())
        case Aggregate.SUM:
            return float(scores_S.sum())
        case _:
            return float(scores_S[-1])


def check_classifier(folder: Path, settings: RewardModelSettings) -> tuple[str, ...]:
    """Return the labels of a model that settings fit.

    Raises:
        ConfigError: If it is no classifier, or the settings ask for what it has not.
    """
    name, unit = f"reward.model.checkpoint = {settings.checkpoint!r}", classified_unit(folder)
    if unit is None:
        raise ConfigError(
            f"{name}: it is no classifier, so that it scores nothing: give a folder whose config.json names a "
            "*ForSequenceClassification or *ForTokenClassification"
        )
    if unit == "token" and settings.unit is ScoredUnit.RESPONSE:
        raise ConfigError(f"{name}: it scores tokens: set reward.model.unit to 'step' or 'token'")
    labels = label_names(folder)
    if len(labels) > 1 and settings.label is None:
        shown = ", ".join(f"{number} ({label})" for number, label in enumerate(labels[:8]))
        raise ConfigError(f"{name}: it has {len(labels)} labels: set reward.model.label to one of {shown}")
    if settings.label is not None and settings.label >= len(labels):
        raise ConfigError(f"reward.model.label = {settings.label}: the model has labels 0 to {len(labels) - 1}")
    return labels


def check_tokens(settings: RewardModelSettings, *, has_policys_ids: bool) -> None:
    """Refuse tokens as they were sampled for a model with another vocabulary than the policy's.

    Raises:
        ConfigError: With what to set.
    """
    if settings.input is RewardInput.TOKEN_IDS and not has_policys_ids:
        raise ConfigError(
            "reward.model.input = 'token_ids': the reward model's vocabulary is not the policy's, so that its ids mean "
            "other texts: set it to 'text'"
        )
