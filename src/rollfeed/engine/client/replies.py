"""Answers of servers, whatever they speak.

Axis: R response tokens of one try.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.http import Failure, TryFailedError
from rollfeed.errors import EngineProtocolError
from rollfeed.types import FinishReason, RoutedExperts, SamplingMask, SeenPicture, VersionSpan

T = TypeVar("T")
_MOST = 1 << 40
"""Above any number of requests, tokens a second, seconds or share."""


class Reply(NamedTuple):
    """Tokens that one try has sampled, in checked arrays."""

    token_ids: NDArray[np.int32]
    """``(R,)``."""
    logprobs: NDArray[np.float32]
    """``(R,)``; NaN where the server tells none."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...] = ()
    """Empty unless the server tells the version of each token."""
    policy_version: int | None = None
    """Of the last token; None where the server does not say."""
    prompt_tokens: int | None = None
    """That the server saw; None where it does not say."""
    cached_tokens: int = 0
    request_id: str | None = None
    """Whose reply it is, by the server's word."""
    sampling_mask: SamplingMask | None = None
    text: str | None = None
    """Where tokens were made of it, since the server told none."""
    seen_pictures: tuple[SeenPicture, ...] | None = None
    """By its word; None where it says nothing of them."""
    routed_experts: RoutedExperts | None = None
    """Of all tokens of what was sent and sampled but the last one; None where the server tells none."""
    is_exact: bool = True
    """Whether the tokens and logprobs are those sampled, so that another try can go on from them."""

    def without_last(self) -> Reply:
        """Return it with all tokens but the last one."""
        length, mask = len(self.token_ids) - 1, self.sampling_mask
        return self._replace(
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            version_spans=tuple(
                span._replace(end=min(span.end, length)) for span in self.version_spans if span.start < length
            ),
            sampling_mask=None if mask is None else mask.at(np.arange(length)),
            text=None,
        )


class IncomingReply(Protocol):
    """A reply that is being received: as a whole, or event by event."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""

    @property
    def has_finished(self) -> bool:
        """Whether the server has said why it ended."""

    def take(self, content: bytes | bytearray) -> None:
        """Add an event, or all of a reply that is not streamed. From any thread.

        Raises:
            TryFailedError: If it is no JSON, or says that the server failed.
            EngineProtocolError: If it is, and breaks the contract.
        """

    def reply(self) -> Reply:
        """Return what has been sampled; with ABORT where the server has not said why it ended.

        Raises:
            EngineProtocolError: If what it says does not fit together.
        """


def decoded(decoder: msgspec.json.Decoder[T], content: bytes | bytearray, *, place: str) -> T:
    """Return the record in a reply's bytes; an error names the place.

    Raises:
        TryFailedError: If they are no JSON to their end, or too deep.
        EngineProtocolError: If it is not of the record's form.
    """
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        raise EngineProtocolError(f"{place}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TryFailedError(Failure.BROKEN, f"{place}: {error}") from error


class ServerRequest(NamedTuple):
    """One try in the form of a server."""

    path: str
    body: bytes
    answer: IncomingReply


class Found(NamedTuple):
    """A server that answers at an address."""

    policy_version: int | None
    """None where the server keeps no name for it."""
    precision: str = "unknown"
    takes_images: bool = False
    is_exact: bool = True
    """Whether it begins no step before the last one has ended, so that it tells versions exactly."""
    num_ranks: int = 1
    """Processes that the model is spread over, each on a GPU of its own."""
    model_path: str | None = None


class ServerLoad(NamedTuple):
    """Load of a server, by its own account."""

    running: int
    waiting: int
    tokens_per_second: float | None = None
    """None where the server does not say."""
    kv_use: float | None = None
    """Share of the places for keys and values that running requests hold; None where the server does not say."""
    recompute_seconds: float | None = None
    """In which it would compute anew all that running requests hold; None where the server does not say."""
    num_preempted: int = 0
    """Requests that it has put back lately for want of places, to be computed again."""
    total_preempted: int | None = None
    """The same since the server was started; None where it was not asked, or does not count them."""

    @property
    def is_plausible(self) -> bool:
        """Whether all numbers may be true; what is not is never reckoned with."""
        told = (self.running, self.waiting, self.tokens_per_second, self.kv_use, self.recompute_seconds)
        return all(each is None or 0 <= each <= _MOST for each in (*told, self.num_preempted, self.total_preempted))

    def preempted_since(self, before: ServerLoad | None) -> ServerLoad:
        """Return the load with what has been put back since an earlier one, by the server's count."""
        earlier = None if before is None else before.total_preempted
        if earlier is None or self.total_preempted is None:
            return self if earlier is None else self._replace(total_preempted=earlier)
        # It begins anew with the server.
        return self._replace(num_preempted=max(self.num_preempted, self.total_preempted - earlier))


class Router(Protocol):
    """Stands in front of servers and chooses one for each request."""

    address: str

    async def workers(self) -> Mapping[str, str]:
        """Return the router's id of each server, by address.

        Raises:
            EngineUnavailableError: If the router does not answer.
            EngineProtocolError: If it answers with something else.
        """

    async def add(self, worker_address: str) -> None:
        """Let a server have requests; raises as :meth:`workers`."""

    async def remove(self, worker_address: str) -> None:
        """Keep requests from a server, if it is listed; raises as :meth:`workers`."""
