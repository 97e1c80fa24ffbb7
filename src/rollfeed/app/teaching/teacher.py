"""The teacher of a run: made from its settings, and compared with the policy as far as both are here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from rollfeed.app.model import Model, load_model
from rollfeed.app.teaching.teacher_rewards import TaughtScorer
from rollfeed.config import EngineSettings, RolloutConfig, Settings
from rollfeed.config.api_key import ApiKey
from rollfeed.engine.embeddable import is_embeddable
from rollfeed.engine.teachers import EmbeddedTeacher, ServedTeacher
from rollfeed.errors import ConfigError
from rollfeed.prompts import LocalTokenizer
from rollfeed.protocols import Scorer, Teacher, Tokenizer
from rollfeed.rewards.hub import RewardHub


def make_teacher(config: RolloutConfig, *, tokenizer: Tokenizer, context_length: int) -> Teacher | None:
    """Return the teacher that the settings name, not yet started; None without one.

    Raises:
        ConfigError: If there is no such model, it has another tokenizer, or the servers' key is not there.
    """
    settings = config.teacher
    if settings is None:
        return None
    if settings.checkpoint is None:
        return ServedTeacher(settings, tokenizer=tokenizer, context_length=context_length)
    return EmbeddedTeacher(
        _model_of(settings.checkpoint, tokenizer, context_length=context_length).checkpoint,
        settings,
        tokenizer=tokenizer,
        context_length=context_length,
        temperature=settings.temperature or config.sampling.rollout_temperature,
        deterministic=config.rollout.deterministic,
    )


def check_teacher(config: Settings, policy: Tokenizer) -> None:
    """Refuse a teacher that could not be used, as far as that is known before it is asked.

    Raises:
        ConfigError: As :func:`make_teacher`.
    """
    settings = config.teacher
    if settings is None:
        return
    ApiKey.read(settings.api_key_env, setting="teacher.api_key_env")
    if settings.checkpoint is not None:
        _model_of(settings.checkpoint, policy, context_length=config.max_context_length)


def no_pictures_of_teacher(config: RolloutConfig) -> str | None:
    """Return why prompts may have no pictures; None where that is not because of a teacher."""
    return None if config.teacher is None else "the teacher takes text only: remove image_key, or [teacher]"


def scorer_of(config: RolloutConfig, hub: RewardHub) -> Scorer:
    """Return what scores samples: the hub, with the teacher's rewards where there is a teacher."""
    return hub if config.teacher is None else TaughtScorer(hub, config.teacher)


@asynccontextmanager
async def entered(services: AbstractAsyncContextManager[object], teacher: Teacher | None) -> AsyncIterator[None]:
    """Enter what a run needs to score, and its teacher."""
    async with services:
        if teacher is None:
            yield
            return
        async with teacher:
            yield


def _model_of(checkpoint: str, policy: Tokenizer, *, context_length: int) -> Model:
    """Return the teacher's model, which has the policy's tokenizer.

    Raises:
        ConfigError: If it has not.
    """
    try:
        model = load_model(checkpoint, samples=False)
        is_embeddable(model.checkpoint, EngineSettings(context_length=context_length))
    except ConfigError as error:
        raise type(error)(f"teacher.checkpoint = {checkpoint!r}: {error}") from None
    if isinstance(policy, LocalTokenizer) and isinstance(model.tokenizer, LocalTokenizer):
        ours, theirs = policy.vocabulary(), model.tokenizer.vocabulary()
        other = next((token for token in sorted(ours) if theirs.get(token) != ours[token]), None)
        if other is not None:
            there = theirs.get(other, "none")
            raise ConfigError(
                f"teacher.checkpoint = {checkpoint!r}: its tokenizer is not the policy's: {other!r} has the id "
                f"{ours[other]} here and {there} there, so that it would score other tokens: choose a teacher with the "
                "same tokenizer"
            )
    return model
