"""Checks of how questions of environments are asked."""

from __future__ import annotations

from typing import Any

from rollfeed.config import EnvironmentSettings, EvalEnvironmentSettings
from rollfeed.config.prompts import AskingSettings
from rollfeed.environments.making import EnvironmentFacts
from rollfeed.errors import ConfigError
from rollfeed.evaluation import SetPlan
from rollfeed.protocols import AnswerMarker, PromptPreprocessor


def asking(settings: AskingSettings | SetPlan) -> dict[str, Any]:
    """Return what a renderer is told of how questions are asked."""
    return {
        "preprocessor": settings.custom_prompt_preprocessor,
        "marker": settings.answer_marker_type,
        "system_prompt": settings.system_prompt,
    }


def asked_marker(settings: AskingSettings | SetPlan) -> AnswerMarker | None:
    """Return the marks in which answers are asked for."""
    is_dialogue = settings.custom_prompt_preprocessor is PromptPreprocessor.TINY_ZERO
    return AnswerMarker.TAGS if is_dialogue else settings.answer_marker_type


def check_asking(
    facts: EnvironmentFacts, chosen: EnvironmentSettings | EvalEnvironmentSettings, settings: AskingSettings | SetPlan
) -> None:
    """Check that the questions of an environment can be asked as settings say.

    Raises:
        ConfigError: If they cannot.
    """
    form = settings.custom_prompt_preprocessor
    if form is PromptPreprocessor.TINY_ZERO and facts.is_multi_turn:
        raise ConfigError(f"environment {chosen.id}: takes several turns, and {form.value} has one: remove it")
    if facts.needs_marker and asked_marker(settings) is None:
        raise ConfigError(
            f"environment {chosen.id}: reads answers between marks only, and nothing asks for them: set "
            f"answer_marker_type = {AnswerMarker.TAGS.value!r}, or {AnswerMarker.BOXED.value!r}"
        )
    if chosen.parameters.get("style") == "compact" and (form or settings.answer_marker_type):
        raise ConfigError(
            f"environment {chosen.id}: style = 'compact' says all itself: remove custom_prompt_preprocessor and "
            "answer_marker_type"
        )
