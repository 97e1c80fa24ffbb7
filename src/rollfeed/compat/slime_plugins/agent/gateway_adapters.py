"""slime's adapters: sessions of agents on a gateway of rollfeed, by which what they ask becomes slime's samples.

An application is served in a thread of its own, and everything of its sessions happens there; what they ask of the
engine happens in the loop of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollfeed.compat.slime_plugins.names.engine_calls import changed_params, is_engine
from rollfeed.compat.slime_plugins.read_back import slime_sample
from rollfeed.compat.slime_plugins.shared_run import Sent, SlimeUseError, Work, current
from rollfeed.gateway.gateway_server import GatewayServer
from rollfeed.gateway.playing import ended
from rollfeed.gateway.policy import Caps, ServedPolicy
from rollfeed.gateway.sessions import OpenSession, Sessions
from rollfeed.protocols import TurnJournal
from rollfeed.types import Completion, FinishKind, Picture, SamplingParams

T = TypeVar("T")
_CAPS = Caps(max_body_bytes=64 << 20)
_IMAGES = ("image", "image_url", "input_image")
_HOOKS = ("_register_routes", "_session_id", "_preprocess_body", "_translate", "_build_reply", "_respond", "_run_turn")


def flatten_content(content: Any) -> str:
    """Return the content of a message as one text: that of its parts, a line each, images named."""
    if isinstance(content, list):
        return "\n".join(filter(None, map(_flat, content)))
    return "" if content is None else str(content)


def _flat(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    if part.get("type") in _IMAGES:
        return "[image omitted]"
    return flatten_content(part.get("text") if "text" in part else part.get("content"))


@dataclass(frozen=True, slots=True)
class _EngineOfRun:
    """The engine of a run, asked from the loop of an application."""

    work: Work

    @property
    def policy_version(self) -> int:
        return self.work.services.endpoint.policy_version

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        asking = self.work.services.endpoint.generate(token_ids, params, request_id=request_id, images=images)
        completion = await self.work.on_loop(asking)
        if completion.finish_reason.kind is FinishKind.ABORT:
            self.work.loop.call_soon_threadsafe(self.work.abort)
        return completion


class GatewayAdapter:
    """Has agents ask the policy, in the API of OpenAI or Anthropic; session ids are their API keys.

    ``sglang_url`` must be the address of the run's engine, whose tokenizer is used. Its chat template says how calls
    and thoughts are written, so that parsers have no effect, and nothing is realigned, whatever the threshold. Raises
    SlimeUseError if no function of a run is being called.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
    ) -> None:
        del tokenizer, tool_parser, reasoning_parser, fork_threshold_tokens
        work = current(type(self).__name__)
        self._url, self._caps = sglang_url, replace(_CAPS, max_turns=max_turns_per_sid or _CAPS.max_turns)
        params, services = SamplingParams(max_new_tokens=1), work.services  # each session has its own
        policy = ServedPolicy(tokenizer=services.tokenizer, context_length=1, params=params, models=("slime-actor",))
        self._sessions = Sessions(policy, services.endpoint, caps=self._caps)
        self._open: dict[str, tuple[OpenSession, Work]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.app = GatewayServer(self._sessions).application(for_operators=False)
        self.app.on_startup.append(self._starts)

    def __init_subclass__(cls) -> None:
        for own in (f"{cls.__name__}.{name}" for name in _HOOKS if name in vars(cls)):
            raise SlimeUseError(f"{own}: hooks of adapters are not supplied: see docs/slime-plugins.md")

    async def _starts(self, app: web.Application) -> None:
        del app
        self._loop = asyncio.get_running_loop()

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Have an agent with this API key answered, until the generate function that opens it returns at the latest.

        Each turn is sampled as ``sampling_defaults`` say; what the agent asks for bounds and stops turns only. Prompt
        and response of a request have at most ``max_context_tokens`` together, 0 those of the run. Raises ValueError
        if there is a session of that id, and SlimeUseError if no generate function is called, or the engine is another.
        """
        work = current("open_session")
        request, services = work.request, work.services
        if request is None:
            raise SlimeUseError("open_session works in generate functions only")
        if not is_engine(self._url, work):
            raise SlimeUseError(f"sglang_url = {self._url!r}: agents are answered by the run's engine, and by no other")
        if sid in self._open:
            raise ValueError(f"there is a session {sid!r} already: give each run of an agent its own")
        policy = ServedPolicy(
            tokenizer=services.tokenizer,
            context_length=min(request.max_context_length, max_context_tokens or request.max_context_length),
            params=changed_params(request.params, sampling_defaults or {}),
            models=(),
            takes_sampling=False,
            rewritten=services.rewritten_turns,
        )
        # The journal knows turns by their numbers in a rollout, so that one session of it can come back.
        journal = TurnJournal() if work.sessions else services.journal
        opened = self._sessions.open_for(
            request, _EngineOfRun(work), policy=policy, caps=self._caps, journal=journal, key=sid
        )
        self._open[sid] = (opened, work)
        work.sessions.append(partial(self.drop_session, sid))

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Any = None,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Any]:
        """End a session, requests under way at once, and return its samples, each with the whole reward.

        There are none where it has ended before. Without a ``base_sample``, which was to be answered, it is dropped.
        """
        found = self._open.get(sid)
        if found is None or base_sample is None:
            await self.drop_session(sid, wait_timeout=wait_timeout)
            return []
        (opened, work), made = found, []
        session, request = opened.session, work.request
        assert request is not None
        samples = await self._in_own_loop(self._sessions.end_for(opened, request))
        self._open.pop(sid, None)
        work.sent.extend(Sent(turn.context_ids(), turn.completion) for turn in session.tree.turns)
        for sample in ended(samples, session.ended_by) if samples else ():
            made.append(each := slime_sample(sample, request.prompt, type(base_sample)))
            each.prompt, each.label, each.reward = base_sample.prompt, base_sample.label, reward
            each.metadata = {**each.metadata, **base_sample.metadata, **(extra_metadata or {})}
        return made

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End what a session has under way, and refuse what comes."""
        del wait_timeout
        if sid in self._open:
            await self._in_own_loop(self._open[sid][0].session.close())

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End a session of which nothing is trained."""
        del wait_timeout
        if sid in self._open:
            await self._in_own_loop(self._sessions.drop_for(self._open[sid][0]))
            self._open.pop(sid, None)

    async def _in_own_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something in the loop in which the application is served, if it is."""
        if self._loop is None or not self._loop.is_running() or self._loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class AnthropicAdapter(GatewayAdapter):
    """Sessions of agents that speak Anthropic's API."""


class OpenAIAdapter(GatewayAdapter):
    """Sessions of agents that speak OpenAI's APIs."""
