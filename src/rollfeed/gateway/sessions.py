"""All sessions of a gateway, by the keys that their agents have."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rollfeed.chat_apis import ApiError, ErrorKind
from rollfeed.gateway.policy import Caps, Dialogues, ServedPolicy
from rollfeed.gateway.session import Session
from rollfeed.gateway.session_journal import SessionJournal, SessionOpened, json_line
from rollfeed.gateway.totals import Totals
from rollfeed.protocols import RolloutRequest, TokenEndpoint, TurnJournal
from rollfeed.types import Prompt, Replied, Sample
from rollfeed.types.fields import to_dict

_KEY_BYTES = 24


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session, and what its opener knows of it."""

    session: Session
    key: str
    """Of its agent: a secret."""
    number: int
    about: Mapping[str, Any]
    """What was said when it was opened: ``metadata`` and ``label`` of its samples."""


class Sessions:
    """The sessions of one policy."""

    def __init__(
        self,
        policy: ServedPolicy,
        endpoint: TokenEndpoint,
        *,
        caps: Caps,
        max_sessions: int = 100_000,
        journal: SessionJournal | None = None,
    ) -> None:
        self.policy = policy
        self.caps = caps
        self.totals = Totals()
        self.journal = journal or SessionJournal()
        self._endpoint = endpoint
        self._dialogues = Dialogues(policy.tokenizer)
        self._max_sessions = max_sessions
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        stored, ended = self.journal.sessions.values(), self.journal.ended.values()
        numbers = [*(each.opened.number for each in stored), *(each.number for each in ended)]
        self._next_number = max(numbers, default=-1) + 1
        for each in stored:
            opened = each.opened
            session = self._session(opened.session_id, opened.at)
            session.restore(each.turns, is_asked_again=False)
            self._put(OpenSession(session, opened.key, opened.number, opened.about))

    @property
    def num_open(self) -> int:
        """Sessions that have not ended."""
        return len(self._by_id)

    def open(self, about: Mapping[str, Any], *, session_id: str | None = None) -> OpenSession:
        """Open a session.

        Args:
            about: ``metadata`` and ``label`` of its samples: JSON values.
            session_id: Of its opener's choice.

        Raises:
            ApiError: If there are too many, or there is or was one of that id.
        """
        self._check_room()
        session_id = secrets.token_hex(8) if session_id is None else session_id
        if session_id in self._by_id or session_id in self.journal.ended:
            raise ApiError(f"there is a session {session_id:.80} already", param="session_id")
        number, self._next_number = self._next_number, self._next_number + 1
        opened = SessionOpened(session_id, _new_key(), number, time.time(), {**about})
        self.journal.opened(opened)
        return self._put(OpenSession(self._session(session_id, opened.at), opened.key, opened.number, opened.about))

    def open_for(
        self,
        request: RolloutRequest,
        endpoint: TokenEndpoint,
        *,
        policy: ServedPolicy,
        caps: Caps,
        journal: TurnJournal,
        key: str | None = None,
    ) -> OpenSession:
        """Open the session of a rollout, which is kept by its run. Raises ApiError if there are too many.

        Its turns are kept in ``journal``, and those that are there are answers to an agent that begins anew. Without a
        ``key`` of its agent one is made that nobody can guess.
        """
        self._check_room()
        if self._dialogues.tokenizer is not policy.tokenizer:
            self._dialogues = Dialogues(policy.tokenizer)
        number, self._next_number = self._next_number, self._next_number + 1
        session = Session(
            f"{request.rollout_id}-{number}",
            policy=policy,
            endpoint=endpoint,
            dialogues=self._dialogues,
            caps=caps,
            totals=self.totals,
            write=partial(journal.write, request),
            opened=time.time(),
            name=f"step{request.step}-rollout{request.rollout_id}",
        )
        session.restore([turn for turn in journal.turns(request) if isinstance(turn, Replied)], is_asked_again=True)
        return self._put(OpenSession(session, key or _new_key(), number, {}))

    def of_key(self, key: str) -> Session:
        """Return the session that an agent has the key of. Raises ApiError if there is none."""
        if not key:
            raise ApiError(
                "no session key: send the key of a session as API key, or in the URL", kind=ErrorKind.AUTHENTICATION
            )
        found = self._by_key.get(key)
        if found is None:
            raise ApiError("no session has this key, or it has ended", kind=ErrorKind.AUTHENTICATION)
        return found.session

    def of_id(self, session_id: str) -> OpenSession:
        """Return a session by its id. Raises ApiError if there is none."""
        if session_id not in self._by_id:
            has_ended = " any more" if session_id in self.journal.ended else ""
            raise ApiError(f"there is no session {session_id:.80}{has_ended}", kind=ErrorKind.NOT_FOUND)
        return self._by_id[session_id]

    async def finish(self, session_id: str, *, reward: Any = None) -> bytes:
        """End a session and return its samples, a line of JSON each; again where it has been finished already.

        Raises:
            ApiError: If there is no such session.
        """
        if session_id in self.journal.ended:
            return self.journal.samples(session_id)
        opened = self.of_id(session_id)
        await opened.session.close()
        if session_id in self.journal.ended:  # while this one waited
            return self.journal.samples(session_id)
        samples = opened.session.samples(_request_of(opened, self.policy))
        lines = [json_line(to_dict(sample if reward is None else replace(sample, reward=reward))) for sample in samples]
        self.journal.ends(session_id, opened.number, lines)
        self._forget(opened)
        self.totals.counts["finished_sessions"] += 1
        self.totals.counts["samples"] += len(lines)
        return b"".join(lines)

    async def drop(self, session_id: str) -> None:
        """End a session of which nothing is to be trained. Raises ApiError if there is no such session."""
        opened = self.of_id(session_id)
        await opened.session.close()
        self._forget(opened)
        self.journal.ends(session_id, opened.number, [])
        self.totals.counts["dropped_sessions"] += 1

    async def end_for(self, opened: OpenSession, request: RolloutRequest) -> list[Sample]:
        await self.drop_for(opened)
        return opened.session.samples(request)

    async def drop_for(self, opened: OpenSession) -> None:
        """End the session of a rollout."""
        await opened.session.close()
        self._forget(opened)

    def _check_room(self) -> None:
        if len(self._by_id) >= self._max_sessions:
            raise ApiError(
                f"{len(self._by_id)} sessions are open, which are the most: end some", kind=ErrorKind.RATE_LIMIT
            )

    def _session(self, session_id: str, at: float) -> Session:
        return Session(
            session_id,
            policy=self.policy,
            endpoint=self._endpoint,
            dialogues=self._dialogues,
            caps=self.caps,
            totals=self.totals,
            write=partial(self.journal.turn, session_id),
            opened=at,
            name=f"session{session_id}",
        )

    def _put(self, opened: OpenSession) -> OpenSession:
        self._by_id[opened.session.session_id] = self._by_key[opened.key] = opened
        return opened

    def _forget(self, opened: OpenSession) -> None:
        self._by_id.pop(opened.session.session_id, None)
        self._by_key.pop(opened.key, None)


def _new_key() -> str:
    return f"rf-{secrets.token_urlsafe(_KEY_BYTES)}"


def _request_of(opened: OpenSession, policy: ServedPolicy) -> RolloutRequest:
    """Return what the samples of a session answer."""
    prompt = Prompt(
        prompt_id=opened.session.session_id,
        source="gateway",
        text="",
        token_ids=np.empty(0, np.int32),
        metadata=opened.about.get("metadata") or {},
        label=opened.about.get("label"),
    )
    return RolloutRequest(
        prompt=prompt,
        params=policy.params,
        group_index=opened.number,
        index=opened.number,
        rollout_id=opened.number,
        step=0,
        max_context_length=policy.context_length,
    )
