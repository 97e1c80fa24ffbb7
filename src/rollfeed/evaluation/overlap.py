"""Finds evaluation prompts that are training prompts too: the same tokens with the same images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rollfeed.evaluation.sets import EvalSet, what_is_asked
from rollfeed.types import Prompt

_QUESTION_CHARACTERS = 80
Asked: TypeAlias = tuple[bytes, tuple[str, ...]]
"""As :func:`rollfeed.evaluation.sets.what_is_asked` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The prompts that an evaluation set has in common with what is trained on."""

    eval_set: str
    num_prompts: int
    """The part of the set that they are."""
    num_common: int
    """Of these, how many are among the training prompts."""
    num_training_prompts: int
    """That it was compared with: all of a data set, and the first 2,000 at most that a run draws of an environment."""
    example: tuple[str, str] | None
    """A prompt of the set and the training prompt that is the same, by their ids."""
    example_text: str | None
    """What both ask, its first 80 characters."""

    @property
    def share(self) -> float:
        """The part of the set that they are."""
        return self.num_common / self.num_prompts

    def describe(self) -> str:
        """Return what people read."""
        trained = f"the {self.num_training_prompts:,} of training that were compared"
        if self.example is None:
            return f"{self.eval_set}: none of {self.num_prompts} prompts is among {trained}"
        return (
            f"{self.eval_set}: {self.num_common} of {self.num_prompts} prompts ({self.share:.1%}) are among {trained}, "
            f"and measure nothing held out: {self.example[0]} is {self.example[1]}, {self.example_text!r}"
        )


def find_overlaps(
    prompts: Iterable[Prompt], eval_sets: Iterable[EvalSet], *, question_of: Callable[[Prompt], str]
) -> tuple[Overlap, ...]:
    """Return what each set has in common with the prompts of a training; ``question_of`` is for people."""
    trained: dict[Asked, str] = {}
    for prompt in prompts:
        trained.setdefault(what_is_asked(prompt), prompt.prompt_id)
    return tuple(_overlap(each, trained, question_of) for each in eval_sets)


def _overlap(eval_set: EvalSet, trained: Mapping[Asked, str], question_of: Callable[[Prompt], str]) -> Overlap:
    common = [prompt for prompt in eval_set.prompts if what_is_asked(prompt) in trained]
    first = common[0] if common else None
    return Overlap(
        eval_set=eval_set.name,
        num_prompts=len(eval_set.prompts),
        num_common=len(common),
        num_training_prompts=len(trained),
        example=None if first is None else (first.prompt_id, trained[what_is_asked(first)]),
        example_text=None if first is None else question_of(first)[:_QUESTION_CHARACTERS],
    )
