"""A set that is measured on: its prompts and its plan, fixed before anything is asked."""

from __future__ import annotations

from dataclasses import dataclass

from rollfeed.errors import ConfigError
from rollfeed.evaluation.keys import SetPlan
from rollfeed.seeds import derive_seed
from rollfeed.types import Prompt, PromptDraw


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

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError(f"eval set {self.name}: has no prompt: choose another file, slice or max_prompt_len")

    @property
    def num_answers(self) -> int:
        """Answers that the set asks for."""
        return len(self.prompts) * self.plan.n_samples_per_prompt

    def seed(self, eval_seed: int) -> int:
        """Return what the seeds of the answers derive from, with the prompt's index and the answer's number."""
        return derive_seed(eval_seed, "eval", self.name)

    def draw(self, index: int) -> PromptDraw:
        """Return the prompt ``index`` as a group to be answered; its group index is ``index``."""
        return PromptDraw(group_index=index, prompt=self.prompts[index])
