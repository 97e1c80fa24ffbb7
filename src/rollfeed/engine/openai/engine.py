"""The engine that the pipeline sees: one OpenAI-style server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.api_key import ApiKey
from rollfeed.config.engine import OpenAISettings
from rollfeed.config.paths import expand_path
from rollfeed.engine.openai.calls import Call
from rollfeed.engine.openai.counters import Counters
from rollfeed.engine.openai.probing import check_health, probe
from rollfeed.engine.openai.scoring import score_texts
from rollfeed.engine.openai.sending import Sender
from rollfeed.engine.openai.transport import Transport
from rollfeed.engine.openai.weights import WeightUpdater
from rollfeed.engine.weight_folders import WeightFolders
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Engine, Tokenizer
from rollfeed.types import (
    Completion,
    CompletionTimings,
    EngineLoad,
    FinishKind,
    FinishReason,
    SamplingParams,
    VersionSpan,
)

_PROBE_TEXT = "The"


class OpenAIEngine(Engine):
    """Serves requests from a server that speaks OpenAI's completions, such as vLLM.

    Entering it asks the server for a few tokens, to know what its replies have in them. To train on
    them, they must have the sampled token ids and their logprobs. Leaving it ends what is still
    under way. It belongs to one event loop.
    """

    def __init__(
        self,
        settings: OpenAISettings,
        *,
        context_length: int,
        tokenizer: Tokenizer,
        exact: bool,
        checkpoint: Path | None = None,
    ) -> None:
        """Make an engine; nothing is connected before it is entered.

        Args:
            settings: Where the server is, and how patient to be with it.
            context_length: Of prompt and response together.
            tokenizer: For the text of responses, and the tokens of text.
            exact: Refuse a server that does not return exact tokens and logprobs. Otherwise responses
                without tokens are tokenised again, and their logprobs are NaN.
            checkpoint: Folder whose configuration and tokenizer go with published weights.

        Raises:
            ConfigError: If the variable that should hold the key does not.
        """
        self.precision = "unknown"
        self.max_running_requests = settings.concurrency
        self.context_length = context_length
        self.counters = Counters()
        self._settings = settings
        self._tokenizer = tokenizer
        self._exact = exact
        self._api_key = ApiKey.read(settings.api_key_env, setting="engine.openai.api_key_env")
        self._calls: set[Call] = set()
        self._is_open = False
        self._folders = WeightFolders(
            None if settings.weights_folder is None else Path(expand_path(settings.weights_folder)),
            checkpoint=checkpoint,
            untied_head=True,
        )

    async def __aenter__(self) -> OpenAIEngine:
        settings = self._settings
        async with AsyncExitStack() as stack:
            transport = await stack.enter_async_context(
                Transport(
                    settings.base_url,
                    api_key=self._api_key,
                    max_connections=settings.concurrency,
                    control_timeout_seconds=settings.control_timeout_seconds,
                )
            )
            self._server = await probe(
                transport,
                model=settings.model,
                prompt_ids=np.asarray(self._tokenizer.encode(_PROBE_TEXT, add_special_tokens=False), np.int32),
                context_length=self.context_length,
                exact=self._exact,
                stream=settings.stream,
                timeout_seconds=settings.startup_timeout_seconds,
            )
            self._transport = transport
            self._slots = asyncio.Semaphore(settings.concurrency)
            self._sender = Sender(
                transport=transport,
                server=self._server,
                counters=self.counters,
                exact=self._exact,
                stream=settings.stream,
                max_tries=settings.max_tries,
            )
            self._weights = WeightUpdater(
                transport=transport,
                sender=self._sender,
                counters=self.counters,
                control_timeout_seconds=settings.control_timeout_seconds,
                update_timeout_seconds=settings.update_timeout_seconds,
            )
            await self._weights.meet()
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for call in tuple(self._calls):
            call.abort()
        try:
            await self._sender.empty(timeout_seconds=self._settings.control_timeout_seconds)
        finally:
            await self._stack.aclose()
            self._folders.close()

    @property
    def policy_version(self) -> int:
        """The version that the next request will meet: that of the last update; before it the server's own, else 0."""
        return self._sender.policy_version if self._is_open else 0

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        params: SamplingParams,
        *,
        request_id: str,
        images: Sequence[str] = (),
    ) -> Completion:
        """Sample one response; see :class:`rollfeed.protocols.Engine`.

        Raises:
            EngineUnavailableError: If there is no answer in time, or after every try.
            EngineProtocolError: If the request or its reply breaks the contract, or the server's logprobs
                would not be those of the distribution sampled from.
        """
        self._check_open()
        self._check_request(params, images)
        self.counters.requests += 1
        call = Call(request_id=request_id, prompt_ids=np.asarray(token_ids, np.int32), params=params)
        started = queued_until = asyncio.get_running_loop().time()
        if call.remaining_tokens <= 0:
            return self._completion(call, queue_seconds=0.0, started=started)
        self._calls.add(call)
        try:
            async with call.scope(), self._slots:
                queued_until = asyncio.get_running_loop().time()
                call.start_clock(self._settings.request_timeout_seconds)
                await self._sender.answer(call)
        except TimeoutError:
            self._check_open()
            if not call.aborted:
                self.counters.timed_out_requests += 1
                raise EngineUnavailableError(
                    f"no answer within request_timeout_seconds = {self._settings.request_timeout_seconds:g}"
                ) from None
            call.finish = call.finish or FinishReason(FinishKind.ABORT)
        finally:
            call.end()
            self._calls.discard(call)
        return self._completion(call, queue_seconds=queued_until - started, started=started)

    async def abort(self, request_id: str | None = None) -> None:
        """Close the connections of one request's tries, or with None of all; the server stops when it notices."""
        self._check_open()
        for call in tuple(self._calls):
            if request_id is None or call.request_id == request_id:
                call.abort()

    async def pause(self) -> None:
        """Hold every request, at the server if it can pause, else on this side."""
        self._check_open()
        await self._weights.pause()

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._check_open()
        await self._weights.resume()

    async def update_weights(self, tensors: Mapping[str, Any], *, policy_version: int) -> None:
        """Write the tensors as a checkpoint and have the server load it.

        Args:
            tensors: All of the model's, numpy or torch, by the checkpoint's names.
            policy_version: What requests from now on are counted as.

        Raises:
            EngineProtocolError: If the weights cannot be written, or the server offers no way to load them.
            EngineUnavailableError: If it is not known whether it has loaded them.
        """
        self._check_open()
        folder = await asyncio.to_thread(self._folders.write, tensors, policy_version=policy_version)
        await self._weights.update(folder, policy_version=policy_version)

    async def update_weights_from_disk(self, folder: Path, *, policy_version: int) -> None:
        """Have the server load a checkpoint that it can read; raises as :meth:`update_weights`."""
        self._check_open()
        await self._weights.update(folder, policy_version=policy_version)

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        """Return what the server says of the texts, by its address; see :class:`rollfeed.protocols.Engine`."""
        self._check_open()
        if self._weights.is_paused:
            return {}
        logprobs_N = await score_texts(
            self._transport, self._server, texts, timeout_seconds=self._settings.update_timeout_seconds
        )
        return {} if logprobs_N is None else {self._settings.base_url: logprobs_N}

    async def load(self) -> EngineLoad:
        """Return how many of this client's requests the server works on, and how many wait here."""
        self._check_open()
        running = len(self._sender.running)
        return EngineLoad(running, len(self._calls) - running)

    async def health(self) -> None:
        """Return when the server says that it is healthy."""
        self._check_open()
        if self._sender.broken is not None:
            raise EngineUnavailableError(self._sender.broken)
        await check_health(self._transport)

    def metrics(self) -> Mapping[str, float]:
        """Return totals since the start, and what is so now."""
        if not self._is_open:
            return self.counters.totals()
        running = self._sender.running
        return {
            **self.counters.totals(),
            "requests_in_flight": float(len(running)),
            #: engine/tokens_in_flight: tokens of these so far
            "tokens_in_flight": float(sum(answer.num_tokens for answer in running.values())),
        }

    def _completion(self, call: Call, *, queue_seconds: float, started: float) -> Completion:
        if call.loose is None:
            token_ids = np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in call.parts)])
            logprobs = np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in call.parts)])
            spans, text = call.spans, None
        else:
            token_ids, text = call.loose.token_ids, None
            if call.loose.lacks_ids:
                text = call.loose.text
                token_ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
            logprobs = np.full(len(token_ids), np.nan, np.float32)
            version = self._sender.policy_version
            spans = (VersionSpan(0, len(token_ids), version),) if len(token_ids) else ()
        if text is None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=call.params.skip_special_tokens)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=text,
            finish_reason=self._finish_reason(call, token_ids, text),
            version_spans=spans,
            precision=self.precision,
            prompt_tokens=len(call.prompt_ids),
            cached_tokens=call.cached_tokens,
            timings=CompletionTimings(queue_seconds, asyncio.get_running_loop().time() - started),
        )

    def _finish_reason(self, call: Call, token_ids: NDArray[np.int32], text: str) -> FinishReason:
        finish = call.finish
        if finish is None or (finish.kind is FinishKind.ABORT and call.remaining_tokens <= 0):
            return FinishReason(FinishKind.LENGTH)  # there was nothing left to sample
        if finish.kind is not FinishKind.STOP or finish.matched is not None:
            return finish
        # Servers do not name the end-of-sequence token, and on some routes nothing else either.
        last = int(token_ids[-1]) if len(token_ids) else None
        if last is not None and last in (*self._tokenizer.eos_token_ids, *call.params.stop_token_ids):
            return FinishReason(FinishKind.STOP, last)
        return FinishReason(FinishKind.STOP, next((stop for stop in call.params.stop if text.endswith(stop)), None))

    def _check_request(self, params: SamplingParams, images: Sequence[str]) -> None:
        if images:
            raise EngineProtocolError("engine.openai takes text only, no images")
        hidden = self._server.logprobs_of.hides(params) if self._exact else None
        if hidden is not None:
            raise EngineProtocolError(
                f"{self._settings.base_url}: its logprobs are of {self._server.logprobs_of.value} and do not show "
                f"{hidden} = {getattr(params, hidden)}: start vLLM with --logprobs-mode processed_logprobs"
            )

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineUnavailableError("the engine is not started: enter it with 'async with'")
