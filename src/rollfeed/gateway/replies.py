"""The answers of a session, by their ids and by what asked for them: a retry is answered again, where it says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollfeed.chat_apis import ApiError, Asked, ErrorKind, Said
from rollfeed.gateway.turn_tree import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One request of an agent."""

    asked: Asked
    reply_id: str
    """Of its answer, unless it was answered before."""
    body: str = ""
    """Digest of its body."""
    key: str = ""
    """What the client says makes it one and the same (``Idempotency-Key``)."""
    is_retry: bool = False
    """Whether the client says that it has sent the same before."""


@dataclass(frozen=True, slots=True)
class AgentReply:
    """The answer to a request, a turn for each choice."""

    said: tuple[Said, ...]
    reply_id: str
    created: int


class Replies:
    """The answers of one session."""

    def __init__(self) -> None:
        self._turns: dict[str, list[Turn]] = {}
        self._by_signal: dict[tuple[str, str], str] = {}
        """Ids of replies, by key or body of their requests."""
        self._under_way: set[tuple[str, str]] = set()

    def put(self, turn: Turn) -> None:
        """Make a turn known by what asked for it."""
        about = turn.about
        self._turns.setdefault(about["reply_id"], []).append(turn)
        for kind in ("key", "body"):
            if about[kind]:
                self._by_signal[kind, about[kind]] = about["reply_id"]

    def turns(self, reply_id: str) -> list[Turn]:
        """Return the turns of an answer. Raises ApiError if there is none of that id."""
        if reply_id not in self._turns:
            raise ApiError(
                f"there is no response {reply_id:.80} in this session",
                kind=ErrorKind.NOT_FOUND,
                param="previous_response_id",
            )
        return self._turns[reply_id]

    def known(self, request: AgentRequest) -> list[Turn] | None:
        """Return the turns that answered a request before, where it says that it was sent before.

        Raises:
            ApiError: If its key is that of another request.
        """
        reply_id = self._by_signal.get(("key", request.key)) if request.key else None
        if reply_id is not None and self._turns[reply_id][0].about["body"] != request.body:
            raise ApiError("the Idempotency-Key is that of another request: send another one")
        if reply_id is None and request.is_retry:
            reply_id = self._by_signal.get(("body", request.body))
        turns = self._turns.get(reply_id or "", [])
        return turns if turns and len(turns) == turns[0].about["num_choices"] else None

    @contextmanager
    def answering(self, request: AgentRequest) -> Iterator[None]:
        """Have a request known as under way while the block runs.

        Raises:
            ApiError: If it says that it was sent before, and that is under way.
        """
        signals = {("key", request.key), ("body", request.body)} - {("key", ""), ("body", "")}
        told = signals if request.is_retry else {("key", request.key)}
        if self._under_way & told:
            raise ApiError("the same request is still being answered", kind=ErrorKind.RATE_LIMIT, code="in_progress")
        self._under_way |= signals
        try:
            yield
        finally:
            self._under_way -= signals
