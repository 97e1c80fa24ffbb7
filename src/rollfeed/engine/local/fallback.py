"""Generation through transformers, for architectures that the embedded engine does not compute itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from rollfeed.engine.local.requests import Request
from rollfeed.engine.local.sampling import Sampler
from rollfeed.engine.local.weights import as_tensor, check_replacement, load_known
from rollfeed.errors import EngineError
from rollfeed.model_files import read_headers, tell_of_unknown
from rollfeed.model_files.names import CheckpointNames
from rollfeed.model_files.trial import vocab_size_of
from rollfeed.protocols import Tokenizer
from rollfeed.types import FinishKind, FinishReason


class TransformersBackend:
    """Answers requests with the same prompt together, and other prompts one after the other.

    transformers' ``generate()`` runs the model; the tokens are chosen by our sampler, so that seeds
    and log-probabilities mean the same as in the other backend.
    """

    policy_version = 0

    def __init__(
        self,
        *,
        checkpoint: Path,
        tokenizer: Tokenizer,
        threads: int,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        load_model: Callable[[], Any],
    ) -> None:
        self.vocab_size = 0
        """The model's, once it is there."""
        self.precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self.num_slots = num_slots
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self.threads = threads
        self._device = device
        self._load_model = load_model
        self._waiting: deque[Request] = deque()
        self._rows: list[Request | None] = []
        """The requests of the present call of ``generate()``; None where one has been answered."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(request is not None for request in self._rows)

    def start(self) -> None:
        torch.set_num_threads(self.threads)
        model = self._load_model()
        self._model = model.to(self._device)
        self._names = CheckpointNames(self._model, read_headers(self._checkpoint))
        # The checkpoint's own generation settings would add processors to ours.
        self._model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        self.vocab_size = vocab_size_of(self._model)
        self._sampler = Sampler(num_rows=self.num_slots, vocab_size=self.vocab_size, device=self._device)

    def close(self) -> None:
        # Nothing to end: torch frees what nobody refers to.
        pass

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        for request in [request for request in self._waiting if chosen(request)]:
            self._finish(request, FinishReason(FinishKind.ABORT))
            self._waiting.remove(request)
        for row, running in enumerate(self._rows):
            if running is not None and chosen(running):
                self._finish(running, FinishReason(FinishKind.ABORT))
                self._rows[row] = None

    def fail_all(self, failure: Callable[[], EngineError]) -> None:
        for request in (*self._rows, *self._waiting):
            if request is not None:
                request.fail(failure())
        self._rows.clear()
        self._waiting.clear()

    def update_weights(self, tensors: Mapping[str, Any], policy_version: int, *, skip_unknown: bool = False) -> None:
        unknown = tensors.keys() - self._names.shapes.keys() if skip_unknown else set()
        load_known(self._replace, tensors, unknown=unknown)
        tell_of_unknown(self._checkpoint, unknown)
        self.policy_version = policy_version

    def _replace(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        names = self._names
        chosen = check_replacement(
            names.shapes, names.ties, tensors, complete=complete, whole_numbers=names.whole_numbers
        )
        converted = names.convert({name: as_tensor(name, tensors[name]) for name in chosen})
        own = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in converted.items():
                own[name].copy_(tensor)

    def take_step_milliseconds(self) -> Mapping[str, float]:
        # generate() makes the steps.
        return {}

    def retract(self) -> None:
        # What generate() has begun it alone can go on with: those requests stay where they are.
        pass

    def weight(self, name: str) -> Tensor | None:
        return self._names.tensor(name)

    def step(self, between_tokens: Callable[[], None]) -> None:
        requests = self._take_equal_prompts()
        self._rows.extend(requests)
        for row, request in enumerate(requests):
            request.start()
            self._sampler.assign(
                row, request.params, seed=request.seed, prompt_ids=request.prompt_ids, stop_ids=request.stop_ids
            )
        prompt_ids = torch.from_numpy(requests[0].prompt_ids.astype(np.int64)).to(self._device)
        self._score(prompt_ids)
        if self.num_running == 0:
            self._rows.clear()
            return
        input_ids = prompt_ids.repeat(len(requests), 1)
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=max(request.max_new_tokens for request in requests), do_sample=False, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([_Choose(self._choose)]),
            stopping_criteria=StoppingCriteriaList([_Ended(self._ended, between_tokens)]),
        )
        self._rows.clear()

    def _take_equal_prompts(self) -> list[Request]:
        first = self._waiting[0]
        equal = [request for request in self._waiting if np.array_equal(request.prompt_ids, first.prompt_ids)]
        taken = equal[: self.num_slots]
        for request in taken:
            self._waiting.remove(request)
        return taken

    def _score(self, prompt_ids: Tensor) -> None:
        """Give requests that ask for it the log-probabilities of the prompt; answer those that ask for no more."""
        if not any(request is not None and request.needs_scoring for request in self._rows):
            return
        with torch.inference_mode():
            logits_PV = self._model(prompt_ids[None]).logits[0].float()
            logprobs_P = logits_PV[:-1].log_softmax(dim=-1).gather(1, prompt_ids[1:, None])[:, 0].cpu().numpy()
        for row, request in enumerate(self._rows):
            if request is None or request.score_from is None:
                continue
            request.prompt_logprobs[request.score_from + 1 :] = logprobs_P[request.score_from :]
            if request.max_new_tokens == 0:
                self._finish(request, FinishReason(FinishKind.LENGTH))
                self._rows[row] = None

    def _choose(self, scores_MV: Tensor) -> Tensor:
        """Sample for the rows that go on; return the token of each row, 0 for the others."""
        chosen = torch.zeros(len(self._rows), dtype=torch.long, device=scores_MV.device)
        rows = np.array([row for row, request in enumerate(self._rows) if request is not None], np.int64)
        if not len(rows):
            return chosen
        num_new_tokens = np.array([request.num_new_tokens for request in self._rows if request is not None], np.int64)
        draws = self._sampler.sample(scores_MV[torch.from_numpy(rows)].float(), rows, num_new_tokens)
        columns = (column.tolist() for column in draws[:3])
        for index, (row, token_id, logprob, finite) in enumerate(zip(rows, *columns, strict=True)):
            request = self._rows[row]
            assert request is not None
            chosen[row] = token_id
            if not finite:
                request.fail(
                    EngineError(
                        f"request {request.request_id}: the model's output is not finite"
                        f" (policy version {self.policy_version})"
                    )
                )
                self._rows[row] = None
                continue
            kept = draws.kept[index] if draws.kept else None
            request.append(token_id, logprob, policy_version=self.policy_version, kept=kept)
            reason = request.finish_reason(self._tokenizer)
            if reason is None:
                request.publish()
            else:
                self._finish(request, reason)
                self._rows[row] = None
        return chosen

    def _ended(self) -> list[bool]:
        return [request is None for request in self._rows]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish(reason, self._tokenizer, precision=self.precision)


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
