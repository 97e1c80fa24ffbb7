"""The embedded engine beside transformers' ``generate()``: same model, prompts, lengths and threads, in turn.

The reference gets all prompts in one padded batch with ``num_return_sequences``, so that it decodes
as many rows at once as ours. Both sample at temperature 1 and make exactly as many tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.app import Model, build_engine
from rollfeed.config import EngineSettings
from rollfeed.protocols import Engine
from rollfeed.types import Completion, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a dog that finds a key.",
    "How do I cook rice? Explain every step.",
    "Which number is the largest: 37, 73 or 61? Explain.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What both engines do."""

    num_groups: int = 4
    n_samples_per_prompt: int = 8
    new_tokens: int = 128
    repetitions: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """The figures of one number of threads."""

    threads: int
    ratio: float
    """Our tokens per second over the reference's, end to end; median over the repetitions."""
    tokens_per_second: float
    reference_tokens_per_second: float
    max_logprob_difference: float
    """Of our logprobs from a forward pass of the reference over the final tokens."""
    greedy_outputs_identical: bool


def bench_engine(
    model: Model, *, threads: Sequence[int], workload: Workload, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure and return JSON values; takes minutes."""
    reference = _Reference(model, workload)
    results = [asdict(_measure(model, reference, count, workload, progress)) for count in threads]
    best = max(results, key=lambda result: float(result["tokens_per_second"]))
    return {"workload": asdict(workload), "questions": QUESTIONS[: workload.num_groups], **best, "by_threads": results}


def _measure(
    model: Model, reference: _Reference, threads: int, workload: Workload, progress: Callable[[str], None]
) -> EngineResult:
    prompts = _prompts(model, workload)
    engine = build_engine(model, EngineSettings(threads=threads, num_slots=32, context_length=512))

    async def measure() -> tuple[list[float], list[float], list[Completion], bool]:
        ours, theirs = [], []
        async with engine:
            await _generate(engine, prompts, workload, seed=0, new_tokens=2)
            for repetition in range(workload.repetitions):
                started = time.perf_counter()
                completions = await _generate(engine, prompts, workload, seed=repetition, new_tokens=None)
                ours.append(time.perf_counter() - started)
                theirs.append(await asyncio.to_thread(reference.seconds, prompts, threads))
                progress(f"{threads} threads, repetition {repetition + 1}: {theirs[-1] / ours[-1]:.2f} times as fast")
            greedy = await _greedy(engine, prompts)
        identical = [c.token_ids.tolist() for c in greedy] == reference.greedy(prompts)
        return ours, theirs, completions, identical

    ours, theirs, completions, identical = asyncio.run(measure())
    num_tokens = workload.num_groups * workload.n_samples_per_prompt * workload.new_tokens
    return EngineResult(
        threads=threads,
        ratio=median(their / our for our, their in zip(ours, theirs, strict=True)),
        tokens_per_second=num_tokens / median(ours),
        reference_tokens_per_second=num_tokens / median(theirs),
        max_logprob_difference=reference.logprob_difference(prompts, completions, workload),
        greedy_outputs_identical=identical,
    )


def _prompts(model: Model, workload: Workload) -> list[NDArray[np.int32]]:
    tokenizer = model.tokenizer
    texts = [tokenizer.render_chat([{"role": "user", "content": q}]) for q in QUESTIONS[: workload.num_groups]]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


async def _generate(
    engine: Engine, prompts: Sequence[NDArray[np.int32]], workload: Workload, *, seed: int, new_tokens: int | None
) -> list[Completion]:
    length = new_tokens or workload.new_tokens
    members = range(workload.n_samples_per_prompt)
    return await asyncio.gather(
        *(
            engine.generate(
                prompt,
                SamplingParams(max_new_tokens=length, min_new_tokens=length, seed=1000 * seed + 100 * group + member),
                request_id=f"{seed}-{group}-{member}",
            )
            for group, prompt in enumerate(prompts)
            for member in members
        )
    )


async def _greedy(engine: Engine, prompts: Sequence[NDArray[np.int32]]) -> list[Completion]:
    params = SamplingParams(max_new_tokens=32, temperature=0.0)
    return await asyncio.gather(
        *(engine.generate(prompt, params, request_id=f"greedy-{index}") for index, prompt in enumerate(prompts))
    )


class _Reference:
    """transformers on the same checkpoint."""

    def __init__(self, model: Model, workload: Workload) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        import rollfeed.engine.local  # noqa: F401 - before torch: how its threads wait is the same for both

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._torch = torch
        self._workload = workload
        loaded: Any = AutoModelForCausalLM
        self._model = loaded.from_pretrained(model.checkpoint, dtype=torch.float32, local_files_only=True).eval()
        self._pad_id = model.tokenizer.eos_token_ids[0]

    def seconds(self, prompts: Sequence[NDArray[np.int32]], threads: int) -> float:
        """Return how long ``generate()`` takes for the workload."""
        torch = self._torch
        torch.set_num_threads(threads)
        ids, mask = self._padded(prompts)
        length = self._workload.new_tokens
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=length,
                min_new_tokens=length,
                num_return_sequences=self._workload.n_samples_per_prompt,
                pad_token_id=self._pad_id,
                use_cache=True,
            )
        return time.perf_counter() - started

    def greedy(self, prompts: Sequence[NDArray[np.int32]]) -> list[list[int]]:
        """Return the greedy continuations of each prompt alone."""
        torch, found = self._torch, []
        for prompt in prompts:
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            with torch.inference_mode():
                whole = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    max_new_tokens=32,
                    pad_token_id=self._pad_id,
                )
            found.append(whole[0, ids.shape[1] :].tolist())
        return found

    def logprob_difference(
        self, prompts: Sequence[NDArray[np.int32]], completions: Sequence[Completion], workload: Workload
    ) -> float:
        """Return the largest difference of our logprobs from a forward pass over the final tokens.

        The end-of-turn token could not be sampled, so it is left out of the reference's distribution too.
        """
        torch, worst = self._torch, 0.0
        for index, completion in enumerate(completions):
            prompt = prompts[index // workload.n_samples_per_prompt]
            ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
            with torch.inference_mode():
                logits = self._model(ids).logits[0, len(prompt) - 1 : -1].double()
                # min_new_tokens forbids stop tokens up to the last token.
                logits[:, self._pad_id] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
            worst = max(worst, float(np.abs(expected - completion.logprobs).max()))
        return worst

    def _padded(self, prompts: Sequence[NDArray[np.int32]]) -> tuple[Any, Any]:
        torch, longest = self._torch, max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        return ids, mask
