"""Generation through transformers, for architectures that the embedded engine does not compute itself."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from rollfeed.engine.backends.backend import Backend, request_failed
from rollfeed.engine.backends.replacement import as_tensor, check_replacement, writing
from rollfeed.engine.backends.requests import Request
from rollfeed.engine.backends.sampling import Sampler
from rollfeed.model_files import read_headers
from rollfeed.model_files.expert_choices import Routers, num_experts_of
from rollfeed.model_files.names import CheckpointNames
from rollfeed.model_files.seeing import looking
from rollfeed.model_files.trial import vocab_size_of
from rollfeed.types import FinishKind, FinishReason


class _Seen(NamedTuple):
    """Keys and values of a prompt with pictures, but for its last token."""

    prompt: tuple[bytes, tuple[str, ...]]
    """Its tokens, and the hashes of its pictures."""
    cache: Any
    shifts: tuple[tuple[Any, Any], ...]
    """Modules that remember by how much a prompt's pictures move what comes behind it, each with that."""


class TransformersBackend(Backend):
    """Answers requests with the same prompt together, and other prompts one after the other.

    transformers' ``generate()`` runs the model; the tokens are chosen by our sampler, so that seeds
    and log-probabilities mean the same as in the other backend. What it has begun it alone can go on with, so that
    nothing is retracted.

    A prompt with pictures is computed once, with its pictures, for all of its requests, those that come later too while
    no other such prompt and no new weights have come between.

    ``load_model`` makes the model, on the engine's thread.
    """

    def __init__(self, *, threads: int, device: torch.device, load_model: Callable[[], Any], **options: Any) -> None:
        super().__init__(vocab_size=0, **options)
        self._threads = threads
        self._device = device
        self._load_model = load_model
        self._num_rows = 0
        """Of the present call of ``generate()``, those that have been answered included."""
        self._seen: _Seen | None = None

    @property
    def threads(self) -> int:
        return self._threads

    def start(self) -> None:
        torch.set_num_threads(self._threads)
        model = self._load_model()
        self._model = model.to(self._device)
        self._names = CheckpointNames(self._model, read_headers(self._checkpoint))
        # The checkpoint's own generation settings would add processors to ours.
        self._model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        self.vocab_size = vocab_size_of(self._model)
        self._routers = Routers(self._model) if num_experts_of(self._model) else None
        self._sampler = Sampler(num_rows=self.num_slots, vocab_size=self.vocab_size, device=self._device)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._names.shapes

    def weight(self, name: str) -> Tensor | None:
        return self._names.tensor(name)

    def _load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        names = self._names
        chosen = check_replacement(
            names.shapes,
            names.ties,
            tensors,
            complete=complete,
            dtype=self._model.dtype,
            whole_numbers=names.whole_numbers,
        )
        self._seen = None
        converted = names.convert({name: as_tensor(name, tensors[name]) for name in chosen})
        own = self._model.state_dict()
        with writing(), torch.no_grad():
            for name, tensor in converted.items():
                own[name].copy_(tensor)

    def step(self, between_tokens: Callable[[], None]) -> None:
        first = self._admit()
        if first is None:
            return
        prompt_ids = torch.from_numpy(first.prompt_ids.astype(np.int64)).to(self._device)
        self._score(first, prompt_ids)
        if not self._running:
            return
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max(request.max_new_tokens for request in self._running.values()),
            do_sample=False,
            pad_token_id=0,
        )
        input_ids = prompt_ids.repeat(self._num_rows, 1)
        with self._begun(first, input_ids) as arguments, self._noting_experts():
            self._model.generate(
                **arguments,
                attention_mask=torch.ones_like(input_ids),
                generation_config=settings,
                logits_processor=LogitsProcessorList([_Choose(self._choose)]),
                stopping_criteria=StoppingCriteriaList([_Ended(self._ended, between_tokens)]),
            )

    @contextmanager
    def _noting_experts(self) -> Iterator[None]:
        """Have requests that ask for it know what their tokens are computed with, unless they have pictures."""
        asking = {row: request for row, request in self._running.items() if request.params.return_routed_experts}
        if self._routers is None or not asking or any(request.pictures.seen for request in asking.values()):
            yield
            return
        num_rows, num_layers = self._num_rows, self._routers.num_layers
        with self._routers.watching() as chosen:

            def experts_of(row: int) -> NDArray[np.integer]:
                passes = [chosen[start : start + num_layers] for start in range(0, len(chosen), num_layers)]
                own = [
                    torch.cat([layer.view(num_rows, -1, layer.shape[1])[row] for layer in layers], dim=1)
                    for layers in passes
                    if len(layers) == num_layers
                ]
                return torch.cat(own).cpu().numpy()

            for row, request in asking.items():
                request.experts_so_far = partial(experts_of, row)
            yield

    @contextmanager
    def _begun(self, first: Request, input_ids: Tensor) -> Iterator[dict[str, Any]]:
        """Yield what ``generate()`` begins with: the prompts, and what is known of their pictures."""
        pictures, length = first.pictures, input_ids.shape[1]
        if not pictures.seen:
            yield {"input_ids": input_ids}
        elif pictures.seen[-1].end < length:
            seen = self._prefilled(first, input_ids[:1])
            for module, shift in seen.shifts:  # another prompt may have come between
                module.rope_deltas = shift
            cache = copy.deepcopy(seen.cache)
            cache.batch_repeat_interleave(self._num_rows)
            yield {"input_ids": input_ids, self._cache_name: cache}
        else:  # generate() wants a token that is still to be computed, and this one is a part of a picture
            pixels = {name: np.concatenate([each] * self._num_rows) for name, each in pictures.pixels.items()}
            with looking(
                self._model, input_ids, is_picture_BL=self._is_picture(first).expand_as(input_ids), pixels=pixels
            ) as arguments:
                yield arguments

    def _prefilled(self, first: Request, input_ids: Tensor) -> _Seen:
        """Return keys and values of a prompt with pictures, computed now if they are not those of the last one."""
        prompt = (first.prompt_ids.tobytes(), first.pictures.content_hashes)
        if self._seen is None or self._seen.prompt != prompt:
            self._seen = None  # its memory may be needed
            cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
            is_picture, pixels = self._is_picture(first)[:, :-1], first.pictures.pixels
            with (
                torch.inference_mode(),
                looking(self._model, input_ids[:, :-1], is_picture_BL=is_picture, pixels=pixels) as arguments,
            ):
                self._model(**arguments, **{self._cache_name: cache}, use_cache=True)
            moved = [module for module in self._model.modules() if getattr(module, "rope_deltas", None) is not None]
            self._seen = _Seen(prompt, cache, tuple((module, module.rope_deltas) for module in moved))
        return self._seen

    @contextmanager
    def _seeing(self, request: Request, input_ids: Tensor) -> Iterator[dict[str, Any]]:
        """Yield the arguments of a pass through a whole prompt."""
        if not request.pictures.seen:
            yield {"input_ids": input_ids}
            return
        is_picture, pixels = self._is_picture(request), request.pictures.pixels
        with looking(self._model, input_ids, is_picture_BL=is_picture, pixels=pixels) as arguments:
            yield arguments

    def _is_picture(self, request: Request) -> Tensor:
        found = request.pictures.is_picture(len(request.prompt_ids))
        return torch.from_numpy(found).to(self._device)[None]

    @property
    def _cache_name(self) -> str:
        """What the model calls keys and values that are there; transformers has renamed it."""
        names = inspect.signature(self._model.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    def _admit(self) -> Request | None:
        """Take the requests with the prompt of the first that waits, and return that one; None where all failed."""
        first = self._waiting[0]
        taken = [request for request in self._waiting if _have_one_prompt(request, first)][: self.num_slots]
        for request in taken:
            self._waiting.remove(request)
            row = len(self._running)
            try:
                self._sampler.assign(
                    row,
                    request.params,
                    seed=request.seed,
                    prompt_ids=request.prompt_ids,
                    stop_ids=request.stop_ids,
                    num_tops=request.num_tops,
                )
            except Exception as error:  # the request's: whatever it asks for must not end the others
                request.fail(request_failed(request, error))
                continue
            self._running[row] = request
            request.start()
        self._num_rows = len(self._running)
        return first if self._running else None

    def _score(self, first: Request, prompt_ids: Tensor) -> None:
        """Give requests that ask for it the log-probabilities of the prompt; answer those that ask for no more."""
        if not any(request.needs_scoring for request in self._running.values()):
            return
        with torch.inference_mode(), self._seeing(first, prompt_ids[None]) as arguments:
            logits_PV = self._model(**arguments).logits[0, :-1].float()
        for row, request in list(self._running.items()):
            if request.score_from is None:
                continue
            logprobs_PV = (logits_PV / request.score_temperature).log_softmax(dim=-1)
            logprobs_P = logprobs_PV.gather(1, prompt_ids[1:, None])[:, 0].cpu().numpy()
            request.prompt_logprobs[request.score_from + 1 :] = logprobs_P[request.score_from :]
            if request.max_new_tokens == 0:
                self._leave(row)
                self._answer(request, FinishReason(FinishKind.LENGTH))

    def _choose(self, scores_MV: Tensor) -> Tensor:
        """Sample for the rows that go on; return the token of each row, 0 for the others."""
        chosen = torch.zeros(self._num_rows, dtype=torch.long, device=scores_MV.device)
        if not self._running:
            return chosen
        rows = np.array(list(self._running), np.int64)
        num_new_tokens = np.array([request.num_new_tokens for request in self._running.values()], np.int64)
        draws = self._sampler.sample(scores_MV[torch.from_numpy(rows)].float(), rows, num_new_tokens)
        chosen[torch.from_numpy(rows)] = torch.from_numpy(draws.token_ids).to(chosen.device)
        self._take(rows.tolist(), draws)
        return chosen

    def _ended(self) -> list[bool]:
        return [row not in self._running for row in range(self._num_rows)]


def _have_one_prompt(request: Request, other: Request) -> bool:
    """Whether what two requests go on from is the same: equal tokens may stand for other pictures."""
    return (
        np.array_equal(request.prompt_ids, other.prompt_ids)
        and request.pictures.content_hashes == other.pictures.content_hashes
    )


class _Choose(LogitsProcessor):
    """Leaves only the token that our sampler drew."""

    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        self._choose = choose

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._choose(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)


class _Ended(StoppingCriteria):
    """Lets the engine carry out commands, then says which rows have been answered."""

    def __init__(self, ended: Callable[[], list[bool]], between_tokens: Callable[[], None]) -> None:
        self._ended = ended
        self._between_tokens = between_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **_kwargs: Any) -> Tensor:
        self._between_tokens()
        return torch.tensor(self._ended(), device=input_ids.device)
