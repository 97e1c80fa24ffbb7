"""Rows of data sets against what will answer and score them: what cannot work is found before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollfeed.app.model import Model
from rollfeed.app.reward_keys import reward_key_problem
from rollfeed.app.rewards import CODE_RM_TYPE, REMOTE_RM_TYPE, own_verifiers
from rollfeed.config import EngineSettings, RolloutConfig
from rollfeed.environments import RLVE_RM_TYPE, EnvironmentRegistry, environment_problem, rlve_problem
from rollfeed.environments import RM_TYPE as ENVIRONMENT_RM_TYPE
from rollfeed.errors import ConfigError, suggestion
from rollfeed.model_files import find_config
from rollfeed.prompts.loader import RowCheck
from rollfeed.protocols import Grader
from rollfeed.rewards import BUILTIN_GRADERS
from rollfeed.rewards.code import tests_problem
from rollfeed.rewards.labels import NO_LABEL, LabelProblem
from rollfeed.rewards.registry import grader_name, no_problem
from rollfeed.rewards.results import REWARD_KEY
from rollfeed.types import Prompt

_SEES = ("vision", "visual", "image", "img")
"""Parts of the names in a model's configuration, one of which every model that takes images has."""


class RowChecks:
    """Makes the check of each data set.

    A row is scored as the reward hub scores it: by the function that its metadata names, else the configured function,
    else the grader of its ``rm_type``. What a user's function can use is not known, and not checked.

    Args:
        config: Functions and the reward server.
        rm_type: Grader of rows that name none.
        reward_key: Which of named numbers counts, for rows that name none.
        has_function: Whether a configured function goes before the graders.
        unscored: What to do about a row that nothing scores; None leaves it to somebody else.
        no_images: Why what answers takes no images; None where it does, or nobody knows.
        graders: Further ones by ``rm_type``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        rm_type: str | None,
        reward_key: str | None,
        has_function: bool,
        unscored: str | None,
        no_images: str | None,
        graders: Mapping[str, Grader] | None = None,
    ) -> None:
        self.runs_programs = False
        """Whether a row was seen whose answers are programs, to be run in a sandbox."""
        self._rm_type = rm_type
        self._reward_key = reward_key
        self._has_function = has_function
        self._unscored = unscored
        # What a function of the user's makes of images is not known.
        self._no_images = None if config.generate or config.rollout else no_images
        self._verifiers = own_verifiers(overridden=config.override_environments)
        self._functions = tuple(config.named_rewards)
        registry, url = EnvironmentRegistry(), config.remote_reward.url
        self._problems: dict[str, LabelProblem] = {
            **{name: grader.problem for name, grader in BUILTIN_GRADERS.items()},
            CODE_RM_TYPE: tests_problem,
            ENVIRONMENT_RM_TYPE: lambda label, metadata: environment_problem(registry, metadata),
            RLVE_RM_TYPE: lambda label, metadata: rlve_problem(registry, metadata),
            REMOTE_RM_TYPE: lambda label, metadata: "no server: set reward.remote.url" if url is None else None,
            **dict.fromkeys(graders or {}, no_problem),
        }

    def of(self, path: str, *, label_key: str | None, unlabelled: Callable[[Prompt, str], str | None]) -> RowCheck:
        """Return the check of a data set.

        Args:
            path: The file, for people.
            label_key: The column with the labels.
            unlabelled: Given a row and its ``rm_type``, the whole message where there is no such column and labels are
                needed; None leaves it to somebody else.
        """

        def check(prompt: Prompt) -> str | None:
            if prompt.images and self._no_images is not None:
                raise ConfigError(f"{path}: {prompt.prompt_id} has images, and {self._no_images}")
            rm_type, problem = self._problem(prompt)
            if problem != NO_LABEL:
                return problem
            if label_key is not None:
                return f"{NO_LABEL} in column {label_key!r}, and rm_type {rm_type!r} needs one"
            if message := unlabelled(prompt, rm_type):
                raise ConfigError(message)
            return None

        return check

    def _problem(self, prompt: Prompt) -> tuple[str, str | None]:
        """Return the grader, and why it can score no answer; an empty name where that is a function."""
        metadata = prompt.metadata
        name = metadata.get("reward_fn")
        if name is not None:
            is_known = isinstance(name, str) and name in self._functions
            remedy = suggestion(str(name), self._functions, otherwise="name it in [reward.functions]")
            return "", None if is_known else f"reward_fn = {name!r:.80}: no such function; {remedy}"
        own: Any = metadata.get("rm_type")
        if self._has_function and not (isinstance(own, str) and own in self._verifiers):
            return "", None
        rm_type = self._rm_type if own is None else own
        if rm_type is None:
            return "", None if self._unscored is None else f"nothing scores it: {self._unscored}"
        found = None
        if isinstance(rm_type, str):
            found = self._problems.get(rm_type) or self._problems.get(grader_name(rm_type))
        if found is None:  # that there is no grader of the settings is no fault of a row, and found elsewhere
            missing = f"rm_type = {own!r:.80}: no such grader; {suggestion(str(own), self._problems)}"
            return "", None if own is None else missing
        self.runs_programs = self.runs_programs or grader_name(rm_type) == CODE_RM_TYPE
        problem = found(prompt.label, metadata)
        if problem is None:
            key = metadata.get(REWARD_KEY) or self._reward_key
            problem = reward_key_problem(key, rm_type, is_of_others=True)
        return rm_type, problem if problem in (None, NO_LABEL) else f"rm_type {rm_type}: {problem}"


def no_images_of(settings: EngineSettings, model: Model) -> str | None:
    """Return why an engine takes text only; None where it takes images, or only its servers know."""
    remedy = "remove image_key, or use [engine.sglang] servers of a model that takes images"
    if settings.openai is not None:
        return f"engine.openai takes text only: {remedy}"
    if settings.sglang is None:
        return f"the embedded engine takes text only: {remedy}"
    config = find_config(model.checkpoint)
    if config is None or any(part in key.lower() for key in config for part in _SEES):
        return None
    return f"the model in {model.checkpoint} takes text only: remove image_key, or use another model"
