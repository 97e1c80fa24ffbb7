"""The embedded engine: a causal language model inside this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.completions import LARGEST_VOCABULARY
from rollfeed.engine.backends.backend import Backend
from rollfeed.engine.backends.replacement import read_tensors
from rollfeed.engine.backends.requests import Request, RequestPictures
from rollfeed.engine.local.loop import EngineThread
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Engine, PictureProcessor, Tokenizer
from rollfeed.types import (
    Completion,
    EngineLoad,
    FinishKind,
    FinishReason,
    FolderUpdate,
    Picture,
    SamplingParams,
    SeenPicture,
    TensorUpdate,
    WeightUpdate,
)


class EmbeddedEngine(Engine):
    """Serves requests from a backend that computes in a thread of its own.

    Entering it loads the weights; leaving it ends the thread, and what is pending fails.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        context_length: int,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self.precision = backend.precision
        self.max_running_requests = backend.num_slots
        self.context_length = context_length
        self.vocab_size = backend.vocab_size or LARGEST_VOCABULARY  # some tell it when they have loaded the model
        self.is_exact = True
        self._backend = backend
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._pictures = pictures
        self._thread = EngineThread(backend, name="rollfeed-engine")
        self._entered = False
        self._num_requests = 0
        self._sampled_tokens = self._stale_cache_tokens = 0

    async def __aenter__(self) -> EmbeddedEngine:
        self._entered = True
        await self._thread.start()
        self.vocab_size = self._backend.vocab_size
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._thread.close()

    @property
    def policy_version(self) -> int:
        """The version of the weights; 0 are the checkpoint's."""
        return self._backend.policy_version

    @property
    def takes_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        return self._pictures is not None

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """Sample one response; see :class:`rollfeed.protocols.Engine`.

        With ``params.seed`` the draws depend on the seed and the number of the token within this
        call: give a request that continues an aborted one another seed.
        """
        self._check_open()
        pictures = await self.look(token_ids, images) if images else None
        return await self.run(self.new_request(token_ids, params, request_id=request_id, pictures=pictures))

    async def look(self, token_ids: NDArray[np.int32], images: Sequence[Picture]) -> RequestPictures:
        """Return pictures for a prompt's request, in which they have their places.

        Raises:
            EngineProtocolError: If the model takes none, or they do not fit the prompt.
        """
        pictures = self._pictures
        if pictures is None:
            raise EngineProtocolError("the embedded engine's model takes text only, no images")
        try:
            # The processor may have to be loaded, or work for somebody else.
            places = await asyncio.to_thread(pictures.locate, np.asarray(token_ids, np.int32), images)
        except ValueError as error:
            raise EngineProtocolError(f"the input's tokens and its pictures do not go together: {error}") from error
        pixels = await asyncio.to_thread(pictures.pixels, images)
        seen = [SeenPicture(image.content_hash, *place) for image, place in zip(images, places, strict=True)]
        return RequestPictures(tuple(seen), pixels)

    def new_request(
        self,
        token_ids: NDArray[np.int32],
        params: SamplingParams,
        *,
        request_id: str,
        ignore_eos: bool = False,
        score_from: int | None = None,
        score_temperature: float = 1.0,
        num_tops: int = 0,
        on_progress: Callable[[], None] | None = None,
        pictures: RequestPictures | None = None,
    ) -> Request:
        """Return a request for :meth:`run`, whose progress can be read meanwhile.

        The prompt is ``(P,)``. With ``score_from``, log-probabilities of the prompt tokens behind this one are computed
        too, at ``score_temperature``; with ``num_tops``, so many of the likeliest tokens at each place. ``on_progress``
        is called on the engine's thread when there are new tokens; it must not raise. ``pictures`` are from
        :meth:`look`.

        Raises:
            EngineProtocolError: If the request can never be served.
        """
        prompt_ids = np.asarray(token_ids, np.int32)
        self._check_request(prompt_ids)
        return Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            eos_token_ids=() if ignore_eos else self._eos_token_ids,
            context_length=self.context_length,
            score_from=score_from,
            score_temperature=score_temperature,
            num_tops=num_tops,
            on_progress=on_progress,
            pictures=pictures,
        )

    async def run(self, request: Request) -> Completion:
        """Answer a request of :meth:`new_request`; when this is cancelled, the request is dropped."""
        self._check_open()
        if request.max_new_tokens == 0 and request.score_from is None:
            request.finish(FinishReason(FinishKind.LENGTH), self._tokenizer, precision=self.precision)
            return request.reply.result()
        self._num_requests += 1
        try:
            self._thread.submit(request)
            completion = await asyncio.wrap_future(request.reply)
        except asyncio.CancelledError:
            self._thread.drop(request)
            raise
        else:
            self._sampled_tokens += len(completion.token_ids)
            if completion.version_spans:  # keys and values stay when weights change
                self._stale_cache_tokens += len(completion.token_ids) - completion.version_spans[0].end
            return completion
        finally:
            self._num_requests -= 1

    def metrics(self) -> Mapping[str, float]:
        return {
            "sampled_tokens": float(self._sampled_tokens),
            "stale_cache_tokens": float(self._stale_cache_tokens),
            "stale_cache_share": self._stale_cache_tokens / max(1, self._sampled_tokens),
        }

    async def abort(self, request_id: str | None = None) -> None:
        """Abort the requests of this id, or all; they have been answered when this returns."""
        await self.abort_where(lambda known: request_id is None or known == request_id)

    async def abort_where(self, chosen: Callable[[str], bool]) -> None:
        """Abort the requests with chosen ids at one point; they have been answered when this returns."""
        self._check_open()
        await self._thread.call(lambda: self._backend.abort(lambda request: chosen(request.request_id)))

    async def pause(self, mode: str = "in_place") -> None:
        """Stop decoding between two steps.

        Args:
            mode: ``in_place`` leaves requests where they are; ``retract`` puts what runs back to waiting, to compute
                its keys and values again; ``abort`` answers everything with what it has.
        """
        self._check_open()
        first = {
            "in_place": None,
            "retract": self._backend.retract,
            "abort": partial(self._backend.abort, lambda _: True),
        }
        await self._thread.set_paused(True, first=first[mode])

    async def resume(self) -> None:
        self._check_open()
        await self._thread.set_paused(False)

    async def apply(self, update: WeightUpdate, *, abort_running: bool = False) -> None:
        """Replace weights in place between two steps, all of those in the update or none; see :class:`Engine`.

        Tensors in a folder that the model does not have are passed over with a warning, if all of its own are there.

        Args:
            update: Tensors may be some of the model's.
            abort_running: Abort all requests at the same point, if the weights fit.
        """
        self._check_open()
        if isinstance(update, TensorUpdate):
            tensors = update.tensors
        elif isinstance(update, FolderUpdate):
            # Read whole before anything is changed: what cannot be read must not stop the engine's thread.
            tensors = await asyncio.to_thread(read_tensors, update.folder)
        else:
            raise EngineProtocolError(f"the embedded engine takes tensors or a folder, not {type(update).__name__}")

        def action() -> None:
            skip_unknown = isinstance(update, FolderUpdate)
            self._backend.update_weights(tensors, update.policy_version, skip_unknown=skip_unknown)
            if abort_running:
                self._backend.abort(lambda _: True)

        await self._thread.call(action)

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        """Return what the engine says of the texts; see :class:`rollfeed.protocols.Engine`.

        Raises:
            EngineUnavailableError: If it is aborted meanwhile.
        """
        self._check_open()
        return {} if self._thread.is_paused else {"the embedded engine": await self.score_tempered(texts)}

    async def score_tempered(self, texts: Sequence[NDArray[np.int32]], temperature: float = 1.0) -> NDArray[np.float64]:
        """Return the log-probabilities of all tokens but the first of each text at a temperature, ``(N,)``.

        Raises:
            EngineUnavailableError: If it is aborted meanwhile.
        """
        nothing = SamplingParams(max_new_tokens=0)
        requests = [
            self.new_request(text, nothing, request_id=f"probe-{index}", score_from=0, score_temperature=temperature)
            for index, text in enumerate(texts)
        ]
        await asyncio.gather(*(self.run(request) for request in requests))
        logprobs_N = np.concatenate([request.prompt_logprobs[1:] for request in requests]).astype(np.float64)
        if not np.isfinite(logprobs_N).all():
            raise EngineUnavailableError("the embedded engine: aborted while it scored texts")
        return logprobs_N

    async def read_weight(self, name: str, *, num_rows: int) -> list[Any]:
        """Return the first rows of a weight as nested lists of float32 values.

        Raises:
            EngineProtocolError: If there is no weight of this name.
        """
        self._check_open()
        rows: list[Any] = []

        def action() -> None:
            tensor = self._backend.weight(name)
            if tensor is None:
                raise EngineProtocolError(f"weight {name!r}: the model has no weight of this name")
            rows.append(tensor[:num_rows].float().cpu().clone())

        await self._thread.call(action)
        values: list[Any] = rows[0].tolist()
        return values

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the model's weights, by the checkpoint's names."""
        return self._backend.shapes

    @property
    def threads(self) -> int:
        """CPU threads it computes with."""
        return self._backend.threads

    async def take_step_milliseconds(self) -> Mapping[str, float]:
        """Return the mean time of a step since the last call: its parts, as far as they are known, and ``whole``."""
        self._check_open()
        taken: list[Mapping[str, float]] = []
        await self._thread.call(lambda: taken.append(self._backend.take_step_milliseconds()))
        return taken[0]

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._backend.num_running

    async def load(self) -> EngineLoad:
        running = min(self._backend.num_running, self._num_requests)
        return EngineLoad(running, self._num_requests - running)

    async def failed(self) -> None:
        """Return when the engine has been closed.

        Raises:
            EngineError: When its thread fails, after which it answers nothing any more.
        """
        await self._thread.failed()

    async def health(self) -> None:
        """Return when the engine's thread is there to serve."""
        try:
            self._check_open()
        except EngineError as error:
            raise EngineUnavailableError(str(error)) from error

    def _check_open(self) -> None:
        if not self._entered:
            raise EngineUnavailableError("the engine is not started: enter it with 'async with'")
        self._thread.check()

    def _check_request(self, token_ids: NDArray[np.int32]) -> None:
        if len(token_ids) == 0:
            raise EngineProtocolError("the input has no tokens")
        if len(token_ids) > self.context_length:
            raise EngineProtocolError(
                f"The input ({len(token_ids)} tokens) is longer than the model's context length"
                f" ({self.context_length} tokens)."
            )
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self._backend.vocab_size:
            raise EngineProtocolError(
                f"the input has token ids outside the model's vocabulary of {self._backend.vocab_size}"
            )
