"""In deterministic mode a response has the same bits whatever else the engine does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray

from rollfeed.engine.local import create_local_engine
from rollfeed.prompts.tokenizer import LocalTokenizer
from rollfeed.protocols import Engine
from rollfeed.types import SamplingParams

Enter = Callable[[Engine], AbstractContextManager[Engine]]
Response = tuple[bytes, bytes, str]
Job = tuple[NDArray[np.int32], SamplingParams]


async def respond(engine: Engine, job: Job) -> Response:
    completion = await engine.generate(job[0], job[1], request_id="r")
    return completion.token_ids.tobytes(), completion.logprobs.tobytes(), completion.text


def run(engine: Engine, jobs: Sequence[Job], *, order: Sequence[int], concurrent: int) -> list[Response]:
    """Answer the jobs in an order of arrival, at most so many at once; return them in their own order."""

    async def main() -> list[Response]:
        gate = asyncio.Semaphore(concurrent)
        responses: dict[int, Response] = {}

        async def one(number: int) -> None:
            async with gate:
                responses[number] = await respond(engine, jobs[number])

        await asyncio.gather(*(one(number) for number in order))
        return [responses[number] for number in range(len(jobs))]

    return asyncio.run(main())


def run_staggered(engine: Engine, jobs: Sequence[Job]) -> list[Response]:
    """Start each job when some tokens of the one before have been sampled."""

    async def main() -> list[Response]:
        tasks = []
        for number, job in enumerate(jobs):
            tasks.append(asyncio.create_task(respond(engine, job)))
            await engine.generate(jobs[0][0], SamplingParams(max_new_tokens=1 + number % 3), request_id="clock")
        return list(await asyncio.gather(*tasks))

    return asyncio.run(main())


def assert_neighbours_do_not_matter(engine: Engine, jobs: Sequence[Job]) -> None:
    expected = run(engine, jobs, order=range(len(jobs)), concurrent=1)
    shuffled = list(range(len(jobs)))
    random.Random(1).shuffle(shuffled)
    assert run(engine, jobs, order=shuffled, concurrent=3) == expected
    assert run(engine, jobs, order=shuffled[::-1], concurrent=len(jobs)) == expected
    assert run_staggered(engine, jobs) == expected


def jobs_of(prompts: Sequence[NDArray[np.int32]], *, max_new_tokens: int) -> list[Job]:
    """Two samples a prompt, some with restricted sampling."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}]
    return [
        (prompt, SamplingParams(max_new_tokens=max_new_tokens, seed=number, **settings[number % 4]))
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(2))
    ]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(("threads", "num_slots"), [(1, 1), (1, 4), (1, 7), (1, 16), (2, 5)])
def test_a_tiny_model_gives_the_same_bits_beside_any_neighbours(
    threads: int, num_slots: int, kernels: str, make_tiny_engine: Callable[..., Engine], entered: Enter
) -> None:
    generator = np.random.default_rng(0)
    # One prompt is longer than a chunk of prefill, one has a single token. Two threads are slow on a busy machine.
    lengths = [1, 5, 40, 300] if threads == 1 else [1, 40]
    prompts = [generator.integers(4, 128, length).astype(np.int32) for length in lengths]
    engine = make_tiny_engine(
        deterministic=True, num_slots=num_slots, threads=threads, context_length=400, kernels=kernels
    )
    with entered(engine):
        assert_neighbours_do_not_matter(engine, jobs_of(prompts, max_new_tokens=20 if threads == 1 else 6))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_normed_heads_give_the_same_bits_beside_any_neighbours(
    kernels: str, save_tiny: Callable[[Any], Path], make_tiny_engine: Callable[..., Engine], entered: Enter
) -> None:
    folder = save_tiny(
        transformers.Qwen3Config(
            vocab_size=128,
            hidden_size=36,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=10,
            max_position_embeddings=512,
            eos_token_id=None,
        )
    )
    prompts = [np.arange(length, dtype=np.int32) + 10 for length in (3, 9, 30)]
    # Odd sizes would put rows and slots at addresses of different alignment.
    engine = make_tiny_engine(checkpoint=folder, deterministic=True, num_slots=5, context_length=251, kernels=kernels)
    with entered(engine):
        assert_neighbours_do_not_matter(engine, jobs_of(prompts, max_new_tokens=20))


@pytest.mark.model
def test_the_real_model_gives_the_same_bits_beside_any_neighbours(
    smollm2: Path, smollm2_tokenizer: LocalTokenizer, smollm2_prompts: list[NDArray[np.int32]], entered: Enter
) -> None:
    engine = create_local_engine(
        checkpoint=smollm2,
        tokenizer=smollm2_tokenizer,
        threads=1,
        num_slots=8,
        context_length=128,
        deterministic=True,
    )
    with entered(engine):
        assert_neighbours_do_not_matter(engine, jobs_of(smollm2_prompts[:2], max_new_tokens=8))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_slots_left_by_earlier_requests_do_not_matter(
    kernels: str, make_tiny_engine: Callable[..., Engine], entered: Enter
) -> None:
    generator = np.random.default_rng(5)
    prompts = [generator.integers(4, 128, length).astype(np.int32) for length in (6, 30, 30)]
    jobs = jobs_of(prompts, max_new_tokens=25)
    with entered(make_tiny_engine(deterministic=True, kernels=kernels)) as fresh:
        expected = run(fresh, jobs, order=range(6), concurrent=1)
    with entered(make_tiny_engine(deterministic=True, kernels=kernels)) as used:
        others = [np.concatenate([prompt[:5], prompt]) for prompt in prompts] + [prompt[:20] for prompt in prompts]
        run(used, jobs_of(others, max_new_tokens=40), order=range(12), concurrent=4)
        assert run(used, jobs, order=range(6), concurrent=4) == expected


def test_native_kernels_give_the_same_bits_with_any_number_of_threads(
    make_tiny_engine: Callable[..., Engine], entered: Enter
) -> None:
    prompts = [np.arange(length, dtype=np.int32) + 4 for length in (3, 50)]
    jobs = jobs_of(prompts, max_new_tokens=12)
    responses = []
    for threads in (1, 2, 3):
        with entered(make_tiny_engine(deterministic=True, threads=threads, kernels="native")) as engine:
            responses.append(run(engine, jobs, order=range(len(jobs)), concurrent=4))
    assert responses[0] == responses[1] == responses[2]
