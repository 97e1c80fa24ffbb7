"""One session: what an agent asks for, answered by the policy, and every turn kept."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollfeed.base.waiting import all_at_once
from rollfeed.chat_apis import ApiError, Asked, ErrorKind, Said, opens_thought, said_of
from rollfeed.chat_apis.shown_pictures import load_pictures
from rollfeed.conversations import Dialogue
from rollfeed.errors import ConfigError, EngineProtocolError, EngineUnavailableError, PictureMismatchError
from rollfeed.gateway.histories import History, read_history
from rollfeed.gateway.policy import Caps, Dialogues, ServedPolicy, joined, refused
from rollfeed.gateway.replies import AgentReply, AgentRequest, Replies
from rollfeed.gateway.samples import samples_of, sift
from rollfeed.gateway.stored_turns import record_of, turn_of
from rollfeed.gateway.totals import Totals
from rollfeed.gateway.turn_tree import Opening, Turn, TurnTree
from rollfeed.protocols import RolloutRequest, TokenEndpoint
from rollfeed.routing import belonging
from rollfeed.seeds import derive_seed
from rollfeed.types import Completion, FinishKind, Replied, Sample, SamplingParams

MAX_TURNS, MAX_TOKENS, MAX_SECONDS, MAX_CONTEXT = "max_turns", "max_tokens", "max_seconds", "max_context"


class SessionAbortedError(Exception):
    """The engine was told to abort: the session goes on when its agent is started again."""


class Session:
    """The requests of one agent, of which any number may be under way.

    ``write`` keeps a turn, before it is answered. ``opened`` is in seconds since 1970; ``name`` begins the ids of its
    requests at the engine.
    """

    def __init__(
        self,
        session_id: str,
        *,
        policy: ServedPolicy,
        endpoint: TokenEndpoint,
        dialogues: Dialogues,
        caps: Caps,
        totals: Totals,
        write: Callable[[Replied], None],
        opened: float,
        name: str,
    ) -> None:
        self.session_id = session_id
        self.caps = caps
        self.opened = opened
        processor = None if policy.picture_input is None else policy.picture_input.pictures
        self.tree = TurnTree(matching=policy.matching, rewritten=policy.rewritten, processor=processor)
        self.ended_by: str | None = None
        """The bound at which a request was refused."""
        self.num_tokens = 0
        """Sampled so far."""
        self.was_aborted = asyncio.Event()
        self.mismatch: PictureMismatchError | None = None
        """What ends the run: a picture that the engine has not seen as it was sent."""
        self._policy = policy
        self._endpoint = endpoint
        self._dialogues = dialogues
        self._totals = totals
        self._write = write
        self._name = name
        self._is_closed = False
        self._next_number = 0
        self._next_call = 0
        self._num_requests = 0
        self._replies = Replies()
        self._asking: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        """Those of the former that have been told to end."""
        self._has_ended = asyncio.Event()
        self._recorded: dict[str, deque[list[Replied]]] = {}
        """Answers of an earlier execution that have not been asked for again, by the digest of the history."""
        self._parts: dict[tuple[str, int], list[Completion]] = {}
        """Of turns that were aborted, by the digest of the history and the choice."""

    @property
    def num_recorded(self) -> int:
        """Turns of an earlier execution that nobody has asked for again."""
        return sum(len(turns) for answers in self._recorded.values() for turns in answers)

    def restore(self, records: Sequence[Replied], *, is_asked_again: bool) -> None:
        """Take the turns of an earlier process.

        ``is_asked_again`` says whether the agent begins anew, so that each is there when it has been asked for again.
        """
        self._next_number = max((record.number + 1 for record in records), default=0)
        by_number: dict[int, Turn] = {}
        for record in records:
            about = record.about["about"]
            self._next_call = max(self._next_call, about["first_call"] + about["num_calls"])
            if record.completion.finish_reason.kind is FinishKind.ABORT:
                self._parts.setdefault((record.about["history"], about["choice"]), []).append(record.completion)
            elif is_asked_again:
                answers = self._recorded.setdefault(record.about["history"], deque())
                if not answers or answers[-1][-1].about["about"]["reply_id"] != about["reply_id"]:
                    answers.append([])
                answers[-1].append(record)
            elif (turn := turn_of(record, by_number)) is not None:
                by_number[turn.number] = turn
                self._put(turn)

    async def ask(self, request: AgentRequest) -> AgentReply:
        """Answer a request: from the record where it says that it is a retry, or else by sampling.

        Raises:
            ApiError: If it cannot be answered.
            SessionAbortedError: If the engine was told to abort.
        """
        if (known := self._replies.known(request)) is not None:
            self._totals.counts["replayed_requests"] += 1
            return self._again(request.asked, known)
        if self._is_closed:
            raise _closed()
        with self._replies.answering(request):
            task = asyncio.current_task()
            assert task is not None
            self._asking.add(task)
            try:
                return await self._answer(request)
            except asyncio.CancelledError:
                self._totals.counts["cancelled_requests"] += 1
                if task in self._ended:
                    task.uncancel()
                    raise _closed() from None
                raise
            finally:
                self._asking.discard(task)
                if task in self._ended:
                    self._ended.discard(task)
                    if not self._ended:
                        self._has_ended.set()

    async def close(self) -> None:
        """End what is under way, and refuse what comes."""
        self._is_closed = True
        for task in self._asking - self._ended:
            self._ended.add(task)
            task.cancel()
        if self._ended:
            self._has_ended.clear()
            await self._has_ended.wait()

    def samples(self, request: RolloutRequest) -> list[Sample]:
        """Return what is trained of the session; it is closed."""
        turns, counts = self.tree.turns, self._totals.counts
        sifted = sift(turns)
        counts["dropped_turns"] += len(sifted.dropped) + self.num_recorded
        counts["dropped_tokens"] += sum(len(turn.completion.token_ids) for turn in sifted.dropped)
        followed = {id(turn.token_parent) for turn in turns}
        num_differing = sum(not self._is_shown(turn) for turn in sifted.kept if id(turn) not in followed)
        counts["differing_contexts"] += num_differing
        forks = [turn.about for turn in turns if turn.about.get("is_fork") and not turn.about["choice"]]
        metadata = {
            "session_id": self.session_id,
            "num_turns": len(turns),
            "num_tool_calls": sum(turn.about["num_calls"] for turn in turns),
            "num_dropped_turns": len(sifted.dropped),
            "num_forks": len(forks),
            "num_lost_tokens": sum(fork["num_lost_tokens"] for fork in forks),
            "num_differing_contexts": num_differing,
        }
        return samples_of(sifted.kept, request, metadata)

    def _is_shown(self, turn: Turn) -> bool:
        """Whether the chat template shows the whole conversation before a turn as it was sent."""
        about = _root(turn).about
        _, dialogue = self._dialogues.of(about["tools"], about["template_kwargs"])
        return dialogue.check(turn.place)

    async def _answer(self, request: AgentRequest) -> AgentReply:
        asked = self._whole(await self._loaded(request.asked))
        history, dialogue = self._read(asked)
        if (again := self._recorded_answer(history.digest.hex(), asked.num_choices)) is not None:
            self._totals.counts["replayed_requests"] += 1
            for turn in again:
                self._put(turn)
            return self._again(asked, again)
        self._check_bounds(asked.num_choices)
        opening = self._open(asked, history, dialogue)
        params = self._params(asked, opening)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        about = {
            "reply_id": request.reply_id,
            "created": int(time.time()),
            "key": request.key,
            "body": request.body,
            "num_choices": asked.num_choices,
        }
        if not opening.goes_on:
            about |= {
                "tools": list(asked.tools),
                "template_kwargs": asked.template_kwargs,
                "is_fork": opening.is_fork,
                "num_lost_tokens": opening.num_lost_tokens,
            }
        sample = partial(self._sample, opening, params, about, number=number)
        if asked.num_choices == 1:
            completions = [await sample(choice=0)]
        else:
            completions = await all_at_once(sample(choice=choice) for choice in range(asked.num_choices))
        return self._record(asked, opening, completions, about)

    async def num_prompt_tokens(self, asked: Asked) -> int:
        """Return how many tokens the policy would be sent. Raises ApiError if it cannot be asked."""
        asked = await self._loaded(asked)
        return len(self._open(asked, *self._read(asked)).token_ids)

    async def _loaded(self, asked: Asked) -> Asked:
        """Return a request whose pictures are kept, and known by their hashes."""
        messages, pictures = await load_pictures(asked.messages, self._policy.picture_input)
        self.tree.pictures.update((picture.content_hash, picture) for picture in pictures)
        return replace(asked, messages=messages)

    def _read(self, asked: Asked) -> tuple[History, Dialogue]:
        if asked.model and self._policy.models and asked.model not in self._policy.models:
            raise ApiError.unknown_model(asked.model, " or ".join(self._policy.models))
        manner, dialogue = self._dialogues.of(asked.tools, asked.template_kwargs)
        return read_history(asked.messages, self._policy.matching, manner=manner), dialogue

    def _open(self, asked: Asked, history: History, dialogue: Dialogue) -> Opening:
        asked.check_length(self._policy.context_length)
        try:
            return self.tree.open(history, dialogue)
        except ConfigError as error:
            raise ApiError(str(error), param="messages") from error

    def _whole(self, asked: Asked) -> Asked:
        """Return a request with the messages before those that it has, where it names a response to go on from."""
        if asked.previous_response_id is None:
            return asked
        before = self._replies.turns(asked.previous_response_id)[0]
        messages = before.conversation()
        if asked.keeps_tools:
            asked = replace(asked, tools=tuple(_root(before).about["tools"]))
        if asked.messages and asked.messages[0]["role"] == "system":  # instructions are those of the request
            instructions, *messages = [asked.messages[0], *(each for each in messages if each["role"] != "system")]
            return replace(asked, messages=(instructions, *messages, *asked.messages[1:]), previous_response_id=None)
        return replace(asked, messages=(*messages, *asked.messages), previous_response_id=None)

    def _check_bounds(self, num_choices: int) -> None:
        caps = self.caps
        if len(self.tree.turns) + num_choices > caps.max_turns:
            self.ended_by = MAX_TURNS
            raise refused(f"the session has had {len(self.tree.turns)} of its {caps.max_turns} turns")
        if self.num_tokens >= caps.max_tokens:
            self.ended_by = MAX_TOKENS
            raise refused(f"the session has sampled all of its {caps.max_tokens} tokens")
        if time.time() - self.opened > caps.max_seconds:
            self.ended_by = MAX_SECONDS
            raise refused(f"the session was opened more than {caps.max_seconds:g} seconds ago")

    def _params(self, asked: Asked, opening: Opening) -> SamplingParams:
        room = self._policy.context_length - len(opening.token_ids)
        if room < 1:
            self.ended_by = MAX_CONTEXT
            raise ApiError.too_long(len(opening.token_ids), self._policy.context_length)
        self.ended_by = None
        left = (self.caps.max_tokens - self.num_tokens) // asked.num_choices
        most = max(1, min(room, left, self._policy.params.max_new_tokens))
        return self._policy.params_for(asked, most=most)

    async def _sample(
        self, opening: Opening, params: SamplingParams, about: Mapping[str, Any], *, number: int, choice: int
    ) -> Completion:
        """Sample a turn, or what is left of one that was aborted."""
        history = opening.history.digest.hex()
        parts = self._parts.get((history, choice), [])
        token_ids = np.concatenate([opening.token_ids, *(part.token_ids for part in parts)])
        num_known = len(token_ids) - len(opening.token_ids)
        most = params.max_new_tokens - num_known
        if most < 1:
            return joined(parts, self._policy.tokenizer, skip_special_tokens=params.skip_special_tokens)
        seed, own = params.seed, self._policy.params.seed
        if seed is None and own is not None:
            seed = derive_seed(own, "turn", number, choice, num_known)
        elif seed is not None and choice:
            seed = derive_seed(seed, "choice", choice)
        params = replace(params, max_new_tokens=most, min_new_tokens=min(most, params.min_new_tokens), seed=seed)
        request_id = f"turn{number}-choice{choice}-{self._name}"
        try:
            with belonging(session=f"session{self.session_id}"):
                completion = await self._endpoint.generate(
                    token_ids, params, request_id=request_id, images=opening.all_images()
                )
        except PictureMismatchError as error:
            self.mismatch = error
            self.was_aborted.set()
            raise ApiError(f"the engine has seen other pictures: {error}", kind=ErrorKind.API_ERROR) from error
        except EngineUnavailableError as error:
            raise ApiError(f"the engine cannot answer: {error}", kind=ErrorKind.OVERLOADED) from error
        except EngineProtocolError as error:
            raise ApiError(f"the engine refuses the request: {error}", kind=ErrorKind.API_ERROR) from error
        if completion.finish_reason.kind is FinishKind.ABORT:
            self._keep_part(opening, completion, {**about, "choice": choice, "first_call": 0, "num_calls": 0})
            raise SessionAbortedError
        self._parts.pop((history, choice), None)
        return joined([*parts, completion], self._policy.tokenizer, skip_special_tokens=params.skip_special_tokens)

    def _keep_part(self, opening: Opening, completion: Completion, about: Mapping[str, Any]) -> None:
        self.was_aborted.set()
        self._totals.counts["aborted_tokens"] += len(completion.token_ids)
        if len(completion.token_ids):
            about = {"history": opening.history.digest.hex(), "about": about}
            self._parts.setdefault((about["history"], about["about"]["choice"]), []).append(completion)
            self._write(Replied(self._take_number(), None, np.empty(0, np.int32), completion, about))

    def _record(
        self, asked: Asked, opening: Opening, completions: Sequence[Completion], about: Mapping[str, Any]
    ) -> AgentReply:
        """Keep the turns of an answer."""
        said = []
        in_thought = opens_thought(opening.token_ids, self._policy.tokenizer)
        for choice, completion in enumerate(completions):
            turn_said = self._said(completion, asked, in_thought=in_thought, first_call=self._next_call)
            own = {"choice": choice, "first_call": self._next_call, "num_calls": len(turn_said.calls)}
            self._next_call += len(turn_said.calls)
            turn = self.tree.add(opening, completion, turn_said.message(), {**about, **own}, number=self._take_number())
            self._write(record_of(turn))
            self._index(turn)
            said.append(turn_said)
        counts = self._totals.counts
        counts["turns"] += len(completions)
        counts["tokens"] += sum(len(completion.token_ids) for completion in completions)
        counts["forks"] += opening.is_fork
        counts["lost_tokens"] += opening.num_lost_tokens
        return AgentReply(tuple(said), about["reply_id"], about["created"])

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _put(self, turn: Turn) -> None:
        self.tree.put(turn)
        self._index(turn)

    def _index(self, turn: Turn) -> None:
        self.num_tokens += len(turn.completion.token_ids)
        self._replies.put(turn)

    def _recorded_answer(self, history: str, num_choices: int) -> list[Turn] | None:
        """Return the turns with which an earlier execution was answered the same, the first that are left."""
        answers = self._recorded.get(history)
        if not answers or len(answers[0]) != num_choices:
            return None
        by_number = {turn.number: turn for turn in self.tree.turns}
        turns = [turn_of(record, by_number) for record in answers[0]]
        found = [turn for turn in turns if turn is not None]
        if len(found) != num_choices:
            return None
        answers.popleft()
        return found

    def _again(self, asked: Asked, turns: Sequence[Turn]) -> AgentReply:
        """Return the answer that turns were."""
        in_thought = opens_thought(turns[0].context, self._policy.tokenizer)
        said = [
            self._said(turn.completion, asked, in_thought=in_thought, first_call=turn.about["first_call"])
            for turn in turns
        ]
        return AgentReply(tuple(said), turns[0].about["reply_id"], turns[0].about["created"])

    def _said(self, completion: Completion, asked: Asked, *, in_thought: bool, first_call: int) -> Said:
        tokenizer, call_format = self._policy.tokenizer, self._dialogues.syntax.call_format
        return said_of(completion, asked, tokenizer, call_format, in_thought=in_thought, first_call=first_call)


def _root(turn: Turn) -> Turn:
    """Return the turn whose context was all that was sent."""
    while turn.token_parent is not None:
        turn = turn.token_parent
    return turn


def _closed() -> ApiError:
    return ApiError("the session has ended", kind=ErrorKind.AUTHENTICATION, code="session_ended")
