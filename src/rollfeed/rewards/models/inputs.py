"""Prompts and responses as a reward model takes them, and where in them it scores.

Axes: N tokens of an input, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollfeed.answers import without_end_token
from rollfeed.config.reward_model import RewardModelSettings, ScoredUnit
from rollfeed.errors import RewardError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Prompt, Sample, SampleStatus


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Prompt and response as tokens of a reward model."""

    token_ids: tuple[int, ...]
    """By the reward model's vocabulary. ``(N,)``."""
    places: tuple[int, ...]
    """Tokens at which it scores, ascending; the last one alone where the whole text has one score."""
    text: str
    """What the tokens are of; empty where they are those that were sampled."""


class InputBuilder:
    """Makes inputs of a reward model.

    Args:
        takes_sampled_ids: Whether it is the policy's too, so that tokens go as they were sampled.
        max_length: Tokens that the model takes; longer inputs are refused, and nothing is cut.
    """

    def __init__(
        self, settings: RewardModelSettings, tokenizer: Tokenizer, *, takes_sampled_ids: bool, max_length: int | None
    ) -> None:
        self._unit = settings.unit
        self._separator = settings.step_separator
        self._step_token = settings.step_token
        self._tokenizer = tokenizer
        self._takes_sampled_ids = takes_sampled_ids
        self._max_length = max_length

    def build(self, sample: Sample, prompt: Prompt) -> ScoredText:
        """Return what stands for an answer.

        Raises:
            RewardError: If it has pictures, no tokens, or more than the model takes, or the chat template shows the
                response otherwise where places in it are scored.
            ConfigError: If the chat template refuses the messages.
        """
        if sample.images or prompt.images:
            raise RewardError("it takes text only, and the sample has pictures")
        by_ids = self._takes_sampled_ids and len(sample.token_ids) > 0
        found = self._of_ids(sample) if by_ids else self._of_text(sample, prompt)
        if not found.token_ids:
            raise RewardError("prompt and response have no tokens, which leaves nothing to score")
        if self._max_length is not None and len(found.token_ids) > self._max_length:
            raise RewardError(
                f"prompt and response have {len(found.token_ids)} tokens, and the reward model takes {self._max_length}"
            )
        return found

    def _of_ids(self, sample: Sample) -> ScoredText:
        ids = sample.token_ids.tolist()
        first, behind = sample.prompt_length, len(ids)
        if self._unit is ScoredUnit.TOKEN and first < behind:
            places = tuple(range(first, behind))
        elif self._unit is ScoredUnit.STEP:
            places = self._step_places_of_ids(sample.token_ids, first)
        else:
            places = (behind - 1,)
        return ScoredText(tuple(ids), places, "")

    def _step_places_of_ids(self, token_ids: NDArray[np.int32], first: int) -> tuple[int, ...]:
        """Return the tokens that end the separators of steps, and the last one."""

        def length(behind: int) -> int:
            return len(self._tokenizer.decode(token_ids[first:behind], skip_special_tokens=False))

        text = self._tokenizer.decode(token_ids[first:], skip_special_tokens=False)
        ends = _separator_ends(without_end_token(text), self._separator)
        places = [_first_reaching(end, length, low=first, high=len(token_ids)) - 1 for end in ends]
        return tuple(sorted({*places, len(token_ids) - 1}))

    def _of_text(self, sample: Sample, prompt: Prompt) -> ScoredText:
        response = without_end_token(sample.response)
        is_plain = prompt.messages is None or not self._tokenizer.has_chat_template
        has_places = self._unit is not ScoredUnit.RESPONSE
        if has_places and not is_plain and self._rendered(prompt, response)[1] is None:
            response = response.strip()  # as many templates do
        ends = _separator_ends(response, self._separator) if self._unit is ScoredUnit.STEP else []
        if self._step_token is not None:
            steps = [response[start:end] for start, end in zip([0, *ends], [*ends, len(response)], strict=True)]
            steps = [step.removesuffix(self._separator) for step in steps if step]
            response, ends = "".join(step + self._step_token for step in steps), []
            for step in steps:
                ends.append((ends[-1] if ends else 0) + len(step) + len(self._step_token))
        if not is_plain:
            text, start = self._rendered(prompt, response)
            prefix = np.empty(0, np.int32)
            if start is None:
                raise RewardError(
                    "its chat template shows the response otherwise than it was written, so that no place in it can be "
                    "scored: set reward.model.unit = 'response', or take another model"
                )
        else:
            text, start = response, 0
            prefix = self._tokenizer.encode(prompt.text, add_special_tokens=True)
        if self._unit is ScoredUnit.RESPONSE:
            ids, offsets = self._tokenizer.encode(text, add_special_tokens=False), np.empty((0, 2), np.int64)
        else:
            ids, offsets = self._tokenizer.encode_with_offsets(text)
        if is_plain and sample.status is not SampleStatus.TRUNCATED and self._tokenizer.eos_token_ids:
            ids = np.append(ids, np.int32(self._tokenizer.eos_token_ids[0]))
        whole = np.concatenate([prefix, ids])
        places = self._places_of_text(offsets, ends, start, start + len(response), num_before=len(prefix))
        return ScoredText(
            tuple(whole.tolist()),
            places if places else (len(whole) - 1,),
            prompt.text + text if is_plain else text,
        )

    def _rendered(self, prompt: Prompt, response: str) -> tuple[str, int | None]:
        """Return the text of a conversation, and where the response as it is begins in it; 0 where nobody asks."""
        render, asked = self._tokenizer.render_chat, prompt.messages or ()
        answer = {"role": "assistant", "content": response}
        text = render((*asked, answer), tools=prompt.tools, add_generation_prompt=False)
        if self._unit is ScoredUnit.RESPONSE:
            return text, 0
        # Behind the assistant's opening, as a short response may be found in the mark of its end, too.
        before = render(asked, tools=prompt.tools, add_generation_prompt=True)
        if text.startswith(before + response):
            return text, len(before)
        found = text.rfind(response)
        return text, None if found < 0 else found

    def _places_of_text(
        self, offsets: NDArray[np.int64], ends: Sequence[int], start: int, behind: int, *, num_before: int
    ) -> tuple[int, ...]:
        """Return the tokens of a text that are scored; none where that is its last one."""
        if self._unit is ScoredUnit.RESPONSE or not len(offsets):
            return ()
        starts_N = offsets[:, 0]
        first, last = (int(np.searchsorted(starts_N, place)) for place in (start, behind))
        if self._unit is ScoredUnit.TOKEN:
            return tuple(range(num_before + first, num_before + last))
        chosen = {int(np.searchsorted(starts_N, start + end)) - 1 for end in ends}
        if self._step_token is None:  # what follows the last separator is a step, too
            chosen.add(last - 1)
        return tuple(sorted(num_before + place for place in chosen if place >= first))


def _separator_ends(text: str, separator: str) -> list[int]:
    """Return the characters behind the separators that end a step with something in it; a run of them ends one."""
    ends, place = list[int](), 0
    while (found := text.find(separator, place)) >= 0:
        end = found + len(separator)
        if text[place:found].strip():
            ends.append(end)
        elif ends:
            ends[-1] = end
        place = end
    return ends if not ends or text[ends[-1] :].strip() else ends[:-1]


def _first_reaching(target: int, length: Callable[[int], int], *, low: int, high: int) -> int:
    """Return the least number of tokens whose text has ``target`` characters; ``length`` grows with it."""
    while low < high:
        middle = (low + high) // 2
        if length(middle) >= target:
            high = middle
        else:
            low = middle + 1
    return low
