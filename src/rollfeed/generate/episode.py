"""An answering of several turns that survives the end of its process.

Its generate function is run again from the beginning, and what an earlier execution sampled and was answered is given
again from the journal.

Invariant: a tool is called at most once, whatever ends the process and whenever, unless it says that twice is the same.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.waiting import all_at_once
from rollfeed.conversations import FollowUp
from rollfeed.errors import RunFailedError
from rollfeed.protocols import REWRITTEN_TURNS, RolloutRequest, Services
from rollfeed.sample_builder import STATUS_OF, SampleBuilder
from rollfeed.seeds import derive_seed
from rollfeed.types import Answered, Called, Completion, FinishKind, Picture, Sample, Sampled, SampleStatus, Turn
from rollfeed.types.text import well_formed

_Turn = TypeVar("_Turn", bound=Turn)


@dataclass(slots=True)
class _Course:
    """Tells how far a rollout has come, whichever of its conversations speaks."""

    done: deque[Turn]
    """By an earlier execution, and not gone through again yet."""
    num_turns: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, to be made unless an earlier execution has."""

    tool: str
    """Its name."""
    arguments: Any
    """JSON values."""
    run: Callable[[], Awaitable[Any]]
    """Makes the call and returns JSON values."""
    if_lost: Any
    """The answer where an earlier execution has made the call and nobody knows what it answered."""
    is_idempotent: bool = False
    """Whether the call is made again then."""


class Episode:
    """One rollout of several turns."""

    def __init__(self, request: RolloutRequest, services: Services) -> None:
        self._request = replace(request, partial=None)
        self._services = services
        self.builder = SampleBuilder(self._request)
        """The sample in the making."""
        self._ended: list[Sample] = []
        self._said = ""
        self._num_known = 0
        self._policy_version = services.endpoint.policy_version
        self._course = _Course(deque(services.journal.turns(request)))
        self._counts = Counter[str]()
        self._waited_seconds = 0.0

    @property
    def num_turns(self) -> int:
        """Turns of the policy so far, those of sub-agents included."""
        return self._course.num_turns

    async def sample(self) -> Completion:
        """Sample the next turn and append it; one that was aborted is resumed.

        An episode ends with the status ABORTED where the finish reason is ABORT.

        Raises:
            RunFailedError: If the function asks for something else than the journal says it did.
        """
        pieces: list[Completion] = []
        is_new = False
        while not pieces or (pieces[-1].finish_reason.kind is FinishKind.ABORT and not is_new):
            sent = self.builder.token_ids[self._num_known :]
            turn = self._again(Sampled)
            is_new = turn is None
            if turn is None:
                turn = Sampled(sent, await self._generate())
                if len(turn.completion.token_ids) or turn.completion.finish_reason.kind is not FinishKind.ABORT:
                    self._services.journal.write(self._request, turn)
            elif not np.array_equal(sent, turn.sent):
                raise self._other(f"{len(turn.sent)} other tokens were sent to the engine")
            self.builder.append_completion(turn.completion)
            self._num_known = len(self.builder.token_ids)
            pieces.append(turn.completion)
            if turn.completion.version_spans:
                self._policy_version = turn.completion.version_spans[-1].policy_version
        self._course.num_turns += 1
        whole = pieces[-1]
        if len(pieces) > 1:
            # A character may be split between two pieces, so their texts cannot simply be joined.
            ids = np.concatenate([piece.token_ids for piece in pieces])
            skip = self._request.params.skip_special_tokens
            whole = replace(whole, text=self._services.tokenizer.decode(ids, skip_special_tokens=skip))
        self._said = whole.text
        return whole

    def tell(self, text: str) -> None:
        """Append what the model is told before its next turn; it is not trained on."""
        self.insert(self._services.tokenizer.encode(text, add_special_tokens=False))

    def insert(self, token_ids: NDArray[np.int32], images: Sequence[Picture] = ()) -> None:
        """Append tokens ``(N,)`` that the model is sent before its next turn; they are not trained on.

        ``images`` are pictures that have their places in them.
        """
        self.builder.append_inserted(token_ids, policy_version=self._policy_version, images=images)

    def follow(self, follow_up: FollowUp) -> bool:
        """Append what a conversation says is sent next, or go on from it; nothing where no token could be sampled then.

        Returns:
            Whether a token can be.
        """
        ids = follow_up.token_ids
        begun = self._begun(ids, follow_up.images) if follow_up.is_context else None
        room = self.builder.remaining_budget - len(ids) if begun is None else begun.remaining_budget
        if room <= 0:
            return False
        if follow_up.rewrites:
            self._counts[REWRITTEN_TURNS] += 1
        if begun is None:
            self.insert(ids, follow_up.images)
        else:
            self._go_on_with(begun)
        return True

    def go_on_behind(self, finished: Sample, token_ids: NDArray[np.int32]) -> None:
        """Begin with a finished sample of the same prompt, all of it kept, and with tokens ``(N,)`` told behind it."""
        self.builder = SampleBuilder(replace(self._request, partial=finished))
        if finished.version_spans:
            self._policy_version = finished.version_spans[-1].policy_version
        self.insert(token_ids)

    def fork(self, context_ids: NDArray[np.int32], images: Sequence[Picture] = ()) -> None:
        """Go on from another context ``(P,)``, such as a summary; what was sampled so far is a sample of its own.

        ``images`` are the pictures that have their places in it.
        """
        self._go_on_with(self._begun(context_ids, images))

    def sub_agent(self, context_ids: NDArray[np.int32], images: Sequence[Picture] = ()) -> Episode:
        """Return a second conversation of this rollout, from a context ``(P,)`` of its own.

        Its turns and calls stand in the same journal, so that one of the two speaks at a time. Its budget is what is
        left of this one's, and its :meth:`end` gives further samples of the rollout.
        """
        other = copy(self)
        other.builder = self._begun(context_ids, images)
        other._ended, other._said, other._num_known, other._counts = [], "", 0, Counter()
        other._waited_seconds = 0.0
        return other

    def end(self, last: Completion, *, response: str | None = None) -> list[Sample]:
        """Return the samples, the last of which ends as its last turn did; a response is the text of its last turn."""
        status = STATUS_OF[last.finish_reason.kind]
        sample = self.builder.build(status, response=last.text if response is None else response)
        about = {**sample.metadata, **self._counts}
        return [*self._ended, replace(sample, metadata=about, non_generation_seconds=self._waited_seconds)]

    async def call(self, tool: str, arguments: Any, run: Callable[[], Awaitable[Any]], *, if_lost: Any) -> Any:
        """Call a tool unless an earlier execution has, and return its answer.

        Arguments and answer are JSON values. ``if_lost`` is the answer where an earlier execution has made the call and
        nobody knows what it gave.

        Raises:
            RunFailedError: If the function asks for something else than the journal says it did.
        """
        return (await self.call_together([ToolCall(tool, arguments, run, if_lost)]))[0]

    async def call_together(self, calls: Sequence[ToolCall]) -> list[Any]:
        """Make several calls at once, each unless an earlier execution has, and return their answers in order.

        Raises:
            RunFailedError: If the function asks for something else than the journal says it did.
        """
        journal, wanted = self._services.journal, [Called(call.tool, _json(call.arguments)) for call in calls]
        num_begun = 0
        while num_begun < len(wanted) and (begun := self._again(Called)) is not None:
            if begun != wanted[num_begun]:
                raise self._other(f"{begun.tool} was called with {begun.arguments!r:.80}")
            num_begun += 1
        # None has been made unless all of them were written.
        is_lost = num_begun == len(wanted)
        known: dict[int, Answered] = {}
        while self._course.done and isinstance(self._course.done[0], Answered):
            answered = self._course.done.popleft()
            assert isinstance(answered, Answered)
            known[answered.place] = answered

        async def make(place: int) -> None:
            call, started = calls[place], time.monotonic()
            answer = call.if_lost if is_lost and not call.is_idempotent else _json(await call.run())
            known[place] = Answered(answer, place, time.monotonic() - started)
            journal.write(self._request, known[place])

        if num_begun < len(wanted):
            for each in wanted[num_begun:]:
                journal.write(self._request, each)
            await journal.flush()
        await all_at_once(make(place) for place in range(len(calls)) if place not in known)
        self._waited_seconds += max((answered.seconds for answered in known.values()), default=0.0)
        return [known[place].answer for place in range(len(calls))]

    def _begun(self, context_ids: NDArray[np.int32], images: Sequence[Picture]) -> SampleBuilder:
        spent = self.builder.num_spent
        return SampleBuilder(self._request, context_ids=context_ids, num_spent=spent, context_images=images)

    def _go_on_with(self, builder: SampleBuilder) -> None:
        self._ended.append(self.builder.build(SampleStatus.COMPLETED, response=self._said))
        self.builder, self._num_known = builder, 0

    async def _generate(self) -> Completion:
        request, budget, num_turns = self._request, self.builder.remaining_budget, self._course.num_turns
        params, behind = request.params, self.builder.response_length
        params = replace(
            params,
            max_new_tokens=budget,
            min_new_tokens=min(budget, params.min_new_tokens),
            # With one seed, equal numbers would choose the first tokens of all turns.
            seed=params.seed
            if params.seed is None or not (num_turns or behind)
            else derive_seed(params.seed, "turn", num_turns, behind),
        )
        return await self._services.endpoint.generate(
            self.builder.token_ids,
            params,
            request_id=f"step{request.step}-turn{num_turns}-rollout{request.rollout_id}",
            images=self.builder.images,
        )

    def _again(self, kind: type[_Turn]) -> _Turn | None:
        """Return what an earlier execution did next; None where it did nothing more."""
        if not self._course.done:
            return None
        turn = self._course.done.popleft()
        if not isinstance(turn, kind):
            raise self._other(f"{type(turn).__name__} follows, not {kind.__name__}")
        return turn

    def _other(self, what: str) -> RunFailedError:
        where = f"rollout {self._request.rollout_id}, turn {self._course.num_turns}"
        return RunFailedError(f"{where}: in an earlier execution {what}: a generate function must do the same again")


def _json(value: Any) -> Any:
    """Return a value as the journal gives it again."""
    return json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
