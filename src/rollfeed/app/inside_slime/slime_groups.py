"""Groups of slime's samples while they are answered: they are drawn, changed in place, and given back.

Invariant: a sample that is given back is as it was drawn, or has an answer that can be gone on with.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollfeed.compat.slime_plugins.shared_run import leaves
from rollfeed.errors import RunFailedError
from rollfeed.faults import blaming, complaint
from rollfeed.pipeline.groups.group_runner import START_ROLLOUT_ID
from rollfeed.protocols import PromptSource, Tokenizer
from rollfeed.types import Prompt

_SOURCE = "--data-source-path"
_LARGE = ("multimodal_inputs", "multimodal_train_inputs")
"""Fields that nobody changes in place, and that may hold images."""


@dataclass(slots=True)
class SlimeMember:
    """One answering: a sample of theirs, and what it has become."""

    sample: Any
    made: Any = None
    """The sample, or the list that a generate function made of it; None before that."""
    num_tries: int = 0
    _drawn: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._drawn = _copied(vars(self.sample))

    def begin(self) -> Any:
        """Return the sample for another try, as it was drawn."""
        if self.num_tries:
            self.restore()
        self.num_tries += 1
        return self.sample

    def restore(self) -> None:
        """Make the sample what it was when it was drawn."""
        vars(self.sample).clear()
        vars(self.sample).update(_copied(self._drawn))
        self.made = None


@dataclass(frozen=True, slots=True)
class SlimeGroup:
    """The answerings of a prompt."""

    members: Sequence[SlimeMember]

    @property
    def made(self) -> list[Any]:
        """The group as slime has it: a sample or a list a member."""
        return [member.sample if member.made is None else member.made for member in self.members]

    @property
    def order(self) -> int:
        """The index of its first sample."""
        return leaves(self.made)[0].index or 0

    def begun(self, *, rollout_id: int) -> list[Any]:
        """Return the group for another step, with what of its answers can be gone on with."""
        for member in self.members:
            if member.made is not member.sample:  # it has forked, or is half made
                member.restore()
            if member.sample.response_length and START_ROLLOUT_ID not in member.sample.metadata:
                member.sample.metadata[START_ROLLOUT_ID] = rollout_id
        return [member.sample for member in self.members]

    def anew(self) -> list[Any]:
        """Return the group as it was drawn."""
        for member in self.members:
            member.restore()
        return [member.sample for member in self.members]


class SlimeGroups(PromptSource):
    """The groups of a step, by the number that the step gives each: that of its turn.

    Those of ``waiting`` go first, and are taken out; ``get_samples`` is the data source's. Where ``is_single_turn``,
    prompts are answered here and must be text.
    """

    def __init__(
        self, get_samples: Any, waiting: list[list[Any]], *, size: int, tokenizer: Tokenizer, is_single_turn: bool
    ) -> None:
        self.drawn: list[SlimeGroup] = []
        self.__wrapped__ = get_samples  # whose prompts these are: it is asked for as many as are needed
        self._waiting = waiting
        self._size = size
        self._tokenizer = tokenizer
        self._is_single_turn = is_single_turn

    def member(self, index: int) -> SlimeMember:
        """Return the answering with that index in the step."""
        return self.drawn[index // self._size].members[index % self._size]

    async def draw(self, count: int) -> Sequence[Prompt]:
        """Return the prompts of the next groups."""
        if (missing := count - len(self._waiting)) > 0:
            await asyncio.to_thread(self._draw_more, missing)
        return [self.enter(self._waiting.pop(0)) for _ in range(min(count, len(self._waiting)))]

    def _draw_more(self, count: int) -> None:
        """Have further groups wait, also where nobody waits for them any more."""
        with blaming(_SOURCE, self.__wrapped__):
            groups = self.__wrapped__(count)
        if not isinstance(groups, list) or not all(isinstance(each, list) for each in groups):
            raise complaint(_SOURCE, self.__wrapped__, f"returned {groups!r:.80}; it must return a list of groups")
        self._waiting += groups

    def enter(self, group: Sequence[Any]) -> Prompt:
        """Number a group, and return its prompt.

        Raises:
            RunFailedError: If it has not as many samples as a group has, or they cannot be answered.
        """
        if len(group) != self._size or any(isinstance(each, list) for each in group):
            raise RunFailedError(
                f"a group of {len(group)} from the data source, --n-samples-per-prompt is {self._size}"
            )
        for sample in group:
            if getattr(sample, "session_id", "") is None:
                sample.session_id = str(uuid.uuid4())
        first, number = group[0], len(self.drawn)
        self.drawn.append(SlimeGroup([SlimeMember(sample) for sample in group]))
        text, is_text = first.prompt, isinstance(first.prompt, str)
        is_answered_here = self._is_single_turn and not getattr(first, "generate_function_path", None)
        if is_answered_here and (not is_text or any((first.multimodal_inputs or {}).values())):
            what = "images" if is_text else "messages"
            raise RunFailedError(
                f"sample {first.index} has {what} for its prompt: "
                + ("name a --custom-generate-function-path" if is_text else "set --apply-chat-template")
            )
        if first.tokens:
            ids = np.asarray(first.tokens[: len(first.tokens) - first.response_length], np.int32)
        elif is_text:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = np.empty(0, np.int32)
        return Prompt(
            prompt_id=f"group {number if first.group_index is None else first.group_index}",
            source="data_source",
            text=text if is_text else "",
            token_ids=ids,
            label=first.label,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the process keeps the state of its data source."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""
        del state


def _copied(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name in _LARGE else copy.copy(value) for name, value in fields.items()}
