"""Generation through transformers, for architectures that the embedded engine does not compute itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from rollfeed.engine.backends.backend import Backend, request_failed
from rollfeed.engine.backends.replacement import as_tensor, check_replacement, writing
from rollfeed.engine.backends.sampling import Sampler
from rollfeed.model_files import read_headers
from rollfeed.model_files.names import CheckpointNames
from rollfeed.model_files.trial import vocab_size_of
from rollfeed.types import FinishKind, FinishReason


class TransformersBackend(Backend):
    """Answers requests with the same prompt together, and other prompts one after the other.

    transformers' ``generate()`` runs the model; the tokens are chosen by our sampler, so that seeds
    and log-probabilities mean the same as in the other backend. What it has begun it alone can go on with, so that
    nothing is retracted.

    ``load_model`` makes the model, on the engine's thread.
    """

    def __init__(self, *, threads: int, device: torch.device, load_model: Callable[[], Any], **options: Any) -> None:
        super().__init__(vocab_size=0, **options)
        self._threads = threads
        self._device = device
        self._load_model = load_model
        self._num_rows = 0
        """Of the present call of ``generate()``, those that have been answered included."""

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
        converted = names.convert({name: as_tensor(name, tensors[name]) for name in chosen})
        own = self._model.state_dict()
        with writing(), torch.no_grad():
            for name, tensor in converted.items():
                own[name].copy_(tensor)

    def step(self, between_tokens: Callable[[], None]) -> None:
        prompt_ids = self._admit()
        if prompt_ids is None:
            return
        self._score(prompt_ids)
        if not self._running:
            return
        input_ids = prompt_ids.repeat(self._num_rows, 1)
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=max(request.max_new_tokens for request in self._running.values()),
                do_sample=False,
                pad_token_id=0,
            ),
            logits_processor=LogitsProcessorList([_Choose(self._choose)]),
            stopping_criteria=StoppingCriteriaList([_Ended(self._ended, between_tokens)]),
        )

    def _admit(self) -> Tensor | None:
        """Take the requests with the prompt of the first that waits, and return the prompt; None where all failed."""
        first = self._waiting[0].prompt_ids
        taken = [request for request in self._waiting if np.array_equal(request.prompt_ids, first)][: self.num_slots]
        for request in taken:
            self._waiting.remove(request)
            row = len(self._running)
            try:
                self._sampler.assign(
                    row, request.params, seed=request.seed, prompt_ids=first, stop_ids=request.stop_ids
                )
            except Exception as error:  # the request's: whatever it asks for must not end the others
                request.fail(request_failed(request, error))
                continue
            self._running[row] = request
            request.start()
        self._num_rows = len(self._running)
        return torch.from_numpy(first.astype(np.int64)).to(self._device) if self._running else None

    def _score(self, prompt_ids: Tensor) -> None:
        """Give requests that ask for it the log-probabilities of the prompt; answer those that ask for no more."""
        if not any(request.needs_scoring for request in self._running.values()):
            return
        with torch.inference_mode():
            logits_PV = self._model(prompt_ids[None]).logits[0, :-1].float()
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
