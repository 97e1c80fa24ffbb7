"""The generate function that has an agent answer: its calls of the policy become the samples of the rollout.

An agent whose process or run was killed is started again. What it asks again, in the same order, is answered from the
turn journal; what it does not ask again is dropped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rollfeed.base.importing import is_async
from rollfeed.base.serving import serve_application
from rollfeed.base.waiting import in_own_thread
from rollfeed.config.agent import AgentSettings
from rollfeed.conversations.picture_places import showing
from rollfeed.errors import AgentError, EngineError, RunFailedError
from rollfeed.faults import attributed, blaming
from rollfeed.gateway.gateway_server import GatewayServer, addresses
from rollfeed.gateway.policy import Caps, ServedPolicy
from rollfeed.gateway.session import MAX_SECONDS, Session
from rollfeed.gateway.sessions import Sessions
from rollfeed.protocols import AgentFn, AgentTask, PictureProcessor, RolloutRequest, Services
from rollfeed.sample_builder import SampleBuilder
from rollfeed.types import Sample, SampleStatus
from rollfeed.types.text import text_of

ENDED_BY = "ended_by"
"""Key of a sample's metadata: the bound at which a call of the agent was refused."""
_FUNCTION = "agent.function"
_TAIL_LINES = 20
_LONGEST_VARIABLE = 100_000
"""Bytes, nearly what Linux takes; a question with pictures is longer, and comes by stdin alone."""
_DYING_SECONDS = 5.0


class AgentPlayer:
    """Answers a prompt by an agent. Fits :class:`rollfeed.protocols.GenerateFn`.

    The gateway is there while a rollout is under way.

    Files of the command in ``settings`` are paths already.
    """

    def __init__(self, settings: AgentSettings, function: AgentFn | None) -> None:
        self._settings = settings
        self._function = function
        self._sessions: Sessions | None = None
        self._num_rollouts = 0
        self._changing: asyncio.Lock | None = None
        self._running: asyncio.Semaphore | None = None
        self._serving = AsyncExitStack()
        self._address = ""

    async def __call__(self, request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
        """Start the agent, and return what it asked of the policy when it has ended.

        Raises:
            AgentError: If it fails, takes too long, or asks nothing.
        """
        policy, caps = self._bounds(request, services)
        async with self._gateway(policy, services) as sessions:
            opened = sessions.open_for(request, services.endpoint, policy=policy, caps=caps, journal=services.journal)
            session = opened.session
            failure: AgentError | None = None
            samples: list[Sample] = []
            try:
                async with self._running or nullcontext():
                    seeing = services.picture_input
                    await self._play(self._task(request, opened.key, seeing and seeing.pictures), session)
            except AgentError as error:
                failure = error
            finally:
                samples = await sessions.end_for(opened, request)
            if session.mismatch is not None:
                raise session.mismatch
            if session.was_aborted.is_set():
                return _aborted(samples, request)
            if failure is not None and (session.ended_by in (None, MAX_SECONDS) or not samples):
                raise failure
            if not samples:
                told = "ended without asking the policy anything"
                raise AgentError(
                    f"the agent {told}" if self._function is None else attributed(_FUNCTION, self._function, told)
                )
            return ended(samples, session.ended_by)

    async def _play(self, task: AgentTask, session: Session) -> None:
        """Have the agent do its task, unless the engine is told to abort before."""
        work = self._call(task) if self._function is not None else self._run(task)
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(session.was_aborted.wait())]
        try:
            seconds = self._settings.max_seconds
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                session.ended_by = MAX_SECONDS
                raise AgentError(f"the agent has not ended within agent.max_seconds = {seconds:g}")
            if tasks[0] in done:
                await tasks[0]
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, task: AgentTask) -> None:
        function: Callable[[AgentTask], Any] = self._function  # type: ignore[assignment]
        try:
            with blaming(_FUNCTION, function):
                # Nobody waits for the thread when this is cancelled: its next call of the policy fails.
                await (function(task) if is_async(function) else in_own_thread(partial(function, task), name="agent"))
        except (RunFailedError, EngineError) as error:
            raise AgentError(str(error)) from error

    async def _run(self, task: AgentTask) -> None:
        """Run the command to its end; whatever it has started ends with it."""
        question = msgspec.json.encode(_question(task))
        question_by_name = {"ROLLFEED_QUESTION": question.decode()} if len(question) < _LONGEST_VARIABLE else {}
        with tempfile.TemporaryDirectory(prefix="rollfeed-agent-", ignore_cleanup_errors=True) as folder:
            try:
                process = await asyncio.create_subprocess_exec(
                    *_ends_with_us(self._settings.command),
                    cwd=folder,
                    env={**os.environ, **_environment(task), **question_by_name},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentError(f"agent.command = {self._settings.command[0]!r}: {error.strerror or error}") from error
            said: deque[str] = deque(maxlen=_TAIL_LINES)
            try:
                _, code = await asyncio.gather(_talk(process, question, said), process.wait())
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DYING_SECONDS):
                        await process.wait()
        if code:
            raise AgentError(f"the agent ended with code {code}: {' '.join(said)[-500:] or 'it said nothing'}")

    def _task(self, request: RolloutRequest, key: str, processor: PictureProcessor | None) -> AgentTask:
        prompt = request.prompt
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        if prompt.images and processor is not None:
            messages = showing(messages, [processor.data_uri(picture) for picture in prompt.images])
        told = addresses(self._address, key)
        return AgentTask(
            text=text_of(messages[-1].get("content")),
            messages=messages,
            openai_base_url=told["openai_base_url"],
            anthropic_base_url=told["anthropic_base_url"],
            api_key=key,
            model=self._settings.models[0],
            metadata={name: prompt.metadata[name] for name in self._settings.metadata_keys if name in prompt.metadata},
        )

    def _bounds(self, request: RolloutRequest, services: Services) -> tuple[ServedPolicy, Caps]:
        settings = self._settings
        policy = ServedPolicy(
            tokenizer=services.tokenizer,
            context_length=request.max_context_length,
            params=request.params,
            models=settings.models,
            takes_sampling=False,
            matching=settings.matching,
            rewritten=services.rewritten_turns,
            picture_input=services.picture_input,
        )
        caps = Caps(
            max_turns=settings.max_turns,
            max_tokens=request.params.max_new_tokens,
            max_seconds=settings.max_seconds,
            max_body_bytes=settings.max_body_mb << 20,
        )
        return policy, caps

    @asynccontextmanager
    async def _gateway(self, policy: ServedPolicy, services: Services) -> AsyncIterator[Sessions]:
        """Give the sessions of the gateway, which serves as long as somebody has them."""
        if self._changing is None:
            self._changing = asyncio.Lock()
            if self._settings.max_running is not None:
                self._running = asyncio.Semaphore(self._settings.max_running)
        async with self._changing:
            if self._sessions is None:
                caps = Caps(max_body_bytes=self._settings.max_body_mb << 20)
                self._sessions = Sessions(policy, services.endpoint, caps=caps)
            if not self._num_rollouts:
                application = GatewayServer(self._sessions).application(for_operators=False)
                serving = serve_application(
                    application, host=self._settings.host, port=self._settings.port, descriptors_each=2
                )
                self._address = await self._serving.enter_async_context(serving)
            self._num_rollouts += 1
        try:
            yield self._sessions
        finally:
            async with self._changing:
                self._num_rollouts -= 1
                if not self._num_rollouts:
                    await self._serving.aclose()


def _ends_with_us(command: Sequence[str]) -> Sequence[str]:
    """Return a command whose process is killed when this one is, where the system has what that takes."""
    setpriv = shutil.which("setpriv")
    if setpriv is None or shutil.which(command[0]) is None:
        return command
    return [setpriv, "--pdeathsig", "KILL", "--", *command]


def _question(task: AgentTask) -> dict[str, Any]:
    return {"text": task.text, "messages": task.messages, "metadata": task.metadata, "model": task.model}


def _environment(task: AgentTask) -> Mapping[str, str]:
    here = urlsplit(task.openai_base_url).hostname or ""
    direct = {name: ",".join(filter(None, [os.environ.get(name), here])) for name in ("no_proxy", "NO_PROXY")}
    return {
        "OPENAI_BASE_URL": task.openai_base_url,
        "OPENAI_API_BASE": task.openai_base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.anthropic_base_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "ROLLFEED_MODEL": task.model,
        **direct,
    }


async def _talk(process: asyncio.subprocess.Process, question: bytes, said: deque[str]) -> None:
    """Tell a program its question, and keep the last of what it says."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(ConnectionError):
        process.stdin.write(question)
        await process.stdin.drain()
        process.stdin.close()
    while piece := await process.stdout.read(1 << 16):
        said.extend(piece.decode(errors="replace").splitlines()[-_TAIL_LINES:])


def ended(samples: Sequence[Sample], ended_by: str | None) -> list[Sample]:
    """Return the samples of a session, the last of them truncated where the agent was refused at a bound."""
    *others, last = samples
    if ended_by is None:
        return [*others, last]
    metadata = {**last.metadata, ENDED_BY: ended_by}
    return [*others, replace(last, status=SampleStatus.TRUNCATED, metadata=metadata)]


def _aborted(samples: Sequence[Sample], request: RolloutRequest) -> list[Sample]:
    """Return samples of a rollout that is gone on with later."""
    if not samples:
        return [SampleBuilder(replace(request, partial=None)).build(SampleStatus.ABORTED, response="")]
    return [*samples[:-1], replace(samples[-1], status=SampleStatus.ABORTED)]
