"""Which evaluation prompts are training prompts too: the same tokens with the same images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollfeed.config import Settings
from rollfeed.environments import EnvironmentSource
from rollfeed.evaluation import EvalSet, what_is_asked
from rollfeed.prompts import DatasetSource, MixtureSource
from rollfeed.protocols import PromptSource
from rollfeed.store import question_of
from rollfeed.types import Prompt

_MAX_PROBLEMS = 2_000
"""Of an environment that are made for the comparison; data sets are compared whole."""
_QUESTION_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What an evaluation set has in common with what is trained on."""

    eval_set: str
    num_prompts: int
    """Of the set."""
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
        """Of the set."""
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


def overlaps(source: PromptSource, eval_sets: Iterable[EvalSet], settings: Settings) -> tuple[Overlap, ...]:
    """Return what each set has in common with a run's prompts; nothing for a source of the user's, which is not drawn.

    Raises:
        RunFailedError: If problems of an environment cannot be made.
    """
    if not isinstance(source, MixtureSource):
        return ()
    trained: dict[tuple[bytes, tuple[str, ...]], str] = {}
    for prompt in _training_prompts(source, settings):
        trained.setdefault(what_is_asked(prompt), prompt.prompt_id)
    return tuple(_overlap(each, trained) for each in eval_sets)


def _training_prompts(source: MixtureSource, settings: Settings) -> Iterator[Prompt]:
    num_drawn = settings.rollout.num_rollout * settings.rollout.rollout_batch_size
    for each in source.sources:
        if isinstance(each, DatasetSource):
            yield from each.prompts
        elif isinstance(each, EnvironmentSource):
            yield from each.first(min(num_drawn, _MAX_PROBLEMS))


def _overlap(eval_set: EvalSet, trained: dict[tuple[bytes, tuple[str, ...]], str]) -> Overlap:
    common = [prompt for prompt in eval_set.prompts if what_is_asked(prompt) in trained]
    first = common[0] if common else None
    return Overlap(
        eval_set=eval_set.name,
        num_prompts=len(eval_set.prompts),
        num_common=len(common),
        num_training_prompts=len(trained),
        example=None if first is None else (first.prompt_id, trained[what_is_asked(first)]),
        example_text=None if first is None else question_of(first.text, first.messages or ())[:_QUESTION_CHARACTERS],
    )
