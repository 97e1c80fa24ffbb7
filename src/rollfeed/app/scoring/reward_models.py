"""The reward model of a run: found, checked against the policy, and opened with the first answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rollfeed.config import RewardSettings
from rollfeed.config.mixture import MIXTURE_RM_TYPE
from rollfeed.config.reward_model import REWARD_MODEL_RM_TYPE, RewardModelSettings
from rollfeed.engine.checkpoint import find_folder
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import has_weights
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer
from rollfeed.protocols import Tokenizer
from rollfeed.rewards.labels import NO_LABEL, LabelProblem
from rollfeed.rewards.models import RewardModelScorer, check_tokens
from rollfeed.rewards.registry import grader_name
from rollfeed.types import Prompt, Sample, Verdict
from rollfeed.workers import WorkerPool

NO_MODEL = "no model: set reward.model.checkpoint"
_NEVER = 1 << 60


def model_workers(settings: RewardModelSettings) -> WorkerPool:
    """Return the process that has the model, once it has been started by the first text."""
    return WorkerPool(
        num_workers=1,
        memory_limit_bytes=None,
        recycle_bytes=_NEVER,
        recycle_calls=_NEVER,
        start_timeout_seconds=settings.load_timeout_seconds,
        threads=settings.threads,
        sees_devices=settings.device != "cpu",
    )


class RunRewardModel:
    """The grader ``reward_model`` of a run. Entered with ``async with``; nothing starts before the first answer.

    ``alone`` is as of :class:`RewardModelScorer`.
    """

    def __init__(self, settings: RewardSettings, *, alone: bool = False) -> None:
        self._settings = settings.model
        self._is_named = REWARD_MODEL_RM_TYPE in settings.rm_types
        self._alone = alone
        self._scorer: RewardModelScorer | None = None
        self._is_open = False
        self._workers = model_workers(settings.model)

    def prepare(self, policy: Tokenizer | None) -> None:
        """Find the model and compare it with the policy, once; nothing without a checkpoint.

        ``policy`` is None where single responses are scored, which have no tokens.

        Raises:
            ConfigError: If there is no such model or tokenizer, or settings do not fit them.
        """
        settings = self._settings
        if settings.checkpoint is None and self._is_named:
            raise ConfigError(f"rm_type {REWARD_MODEL_RM_TYPE}: {NO_MODEL}")
        if settings.checkpoint is None or self._scorer is not None:
            return
        try:
            folder = find_folder(settings.checkpoint, with_weights=not settings.servers)
            tokenizer = load_tokenizer(folder)
        except CheckpointError as error:
            raise CheckpointError(f"reward.model.checkpoint: {error}") from None
        if not settings.servers and not has_weights(folder):
            raise CheckpointError(f"reward.model.checkpoint: {folder}: no weights: put its *.safetensors there")
        has_ids = isinstance(policy, LocalTokenizer) and tokenizer.vocabulary() == policy.vocabulary()
        has_template = has_ids and isinstance(policy, LocalTokenizer) and tokenizer.has_template_of(policy)
        if policy is not None:
            check_tokens(settings, has_policys_ids=has_ids)
        self._scorer = RewardModelScorer(
            settings,
            folder,
            tokenizer,
            workers=self._workers,
            is_policys=has_template or (has_ids and settings.input == "token_ids"),
            alone=self._alone,
        )

    async def __aenter__(self) -> RunRewardModel:
        self._entered = AsyncExitStack()
        await self._entered.enter_async_context(self._workers)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._entered.aclose()

    async def __call__(self, sample: Sample, prompt: Prompt) -> Verdict:
        """Return the model's score of an answer; ERROR or TIMEOUT with the cause where there is none."""
        try:
            self.prepare(None)
        except ConfigError as error:
            return Verdict.failed(str(error))
        if self._scorer is None:
            return Verdict.failed(f"rm_type {REWARD_MODEL_RM_TYPE}: {NO_MODEL}")
        if not self._is_open:
            self._is_open = True
            await self._entered.enter_async_context(self._scorer)
        return await self._scorer(sample, prompt)


def scored_by_model(settings: RewardSettings) -> frozenset[str]:
    """Return every ``rm_type`` whose score is that of the reward model, or has a part that is."""
    is_mixed = any(part.rm_type == REWARD_MODEL_RM_TYPE for part in settings.mixture)
    return frozenset([REWARD_MODEL_RM_TYPE, MIXTURE_RM_TYPE] if is_mixed else [REWARD_MODEL_RM_TYPE])


def learned_problems(settings: RewardSettings, others: Mapping[str, LabelProblem]) -> dict[str, LabelProblem]:
    """Return what says why a row cannot be scored by the model or the mixture; ``others`` are those of its parts."""
    named = [part.rm_type for part in settings.mixture if part.rm_type is not None]

    def of_model(label: Any, metadata: Mapping[str, Any]) -> str | None:
        return None if settings.model.checkpoint is not None else NO_MODEL

    def of_mixture(label: Any, metadata: Mapping[str, Any]) -> str | None:
        for name in named:
            of_part = of_model if name == REWARD_MODEL_RM_TYPE else others.get(name) or others.get(grader_name(name))
            found = None if of_part is None else of_part(label, metadata)
            if found is not None:
                return found if found == NO_LABEL else f"part {name!r}: {found}"
        return None

    return {REWARD_MODEL_RM_TYPE: of_model, MIXTURE_RM_TYPE: of_mixture}
