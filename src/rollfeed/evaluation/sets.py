"""A set that is measured on: its prompts and its plan, fixed before anything is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollfeed.errors import ConfigError
from rollfeed.evaluation.keys import SetPlan
from rollfeed.seeds import derive_seed
from rollfeed.types import Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Prompts by index, and how each is answered.

    Raises:
        ConfigError: If there is no prompt.
    """

    name: str
    prompts: tuple[Prompt, ...]
    plan: SetPlan
    num_over_length: int = 0
    """Prompts left out because they are too long."""
    num_repeats: int = 0
    """Prompts left out because an earlier one asks the same."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError(f"eval set {self.name}: has no prompt: choose another file, slice or max_prompt_len")

    @property
    def num_missing(self) -> int:
        """Prompts that were asked for and are not there."""
        return max(0, (self.plan.num_prompts or 0) - len(self.prompts))

    @property
    def num_answers(self) -> int:
        """Answers that the set asks for."""
        return len(self.prompts) * self.plan.n_samples_per_prompt

    def seed(self, eval_seed: int) -> int:
        """Return what the seeds of the answers derive from, with the prompt's index and the answer's number."""
        return derive_seed(eval_seed, "eval", self.name)

    def draw(self, index: int) -> Group:
        """Return the prompt ``index`` as a group to be answered; its group index is ``index``."""
        return Group(index, self.prompts[index])


def without_repeats(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts of which no earlier one asks the same: the same tokens with the same images."""
    kept: dict[tuple[bytes, tuple[str, ...]], Prompt] = {}
    for prompt in prompts:
        kept.setdefault(what_is_asked(prompt), prompt)
    return list(kept.values())


def what_is_asked(prompt: Prompt) -> tuple[bytes, tuple[str, ...]]:
    """Return what makes two prompts the same to a model: tokens and images."""
    return prompt.token_ids.tobytes(), prompt.images
