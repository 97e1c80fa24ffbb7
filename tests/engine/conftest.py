"""Models, engines and helpers of the engine's tests. The real model is loaded once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.server import ServedModel, Service, serve
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer
from rollfeed.protocols import Engine
from rollfeed.testing.prompts import CharTokenizer
from rollfeed.types import Completion

TINY_VOCAB = 128


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_modest() -> None:
    transformers.utils.logging.disable_progress_bar()
    # Two busy threads wait for each other more than they compute when the machine has other work.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve_checkpoint(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> LocalTokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2_tokenizer: LocalTokenizer) -> list[NDArray[np.int32]]:
    """Prompts of one chat template: they share their beginning."""
    questions = [
        "What is the capital of France?",
        "Name a colour.",
        "How do I boil an egg?",
        "Which is larger, 7 or 9?",
    ]
    texts = [smollm2_tokenizer.render_chat([{"role": "user", "content": question}]) for question in questions]
    return [smollm2_tokenizer.encode(text, add_special_tokens=False) for text in texts]


@contextmanager
def _entered(engine: Engine) -> Iterator[Engine]:
    asyncio.run(engine.__aenter__())
    yield engine
    asyncio.run(engine.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def entered() -> Callable[[Engine], AbstractContextManager[Engine]]:
    """Hold an engine open over several event loops, as the engine's thread belongs to none."""
    return _entered


@pytest.fixture(scope="session")
def smollm2_engine(smollm2: Path, smollm2_tokenizer: LocalTokenizer) -> Iterator[Engine]:
    engine = create_local_engine(
        checkpoint=smollm2,
        tokenizer=smollm2_tokenizer,
        threads=1,
        num_slots=32,
        context_length=256,
        deterministic=False,
    )
    with _entered(engine):
        yield engine


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Write a checkpoint with random weights, biases and norms for a transformers configuration."""

    def save(config: Any) -> Path:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
        folder = tmp_path_factory.mktemp(config.model_type)
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_llama(save_tiny: Callable[[Any], Path]) -> Path:
    return save_tiny(
        transformers.LlamaConfig(
            vocab_size=TINY_VOCAB,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=3,
        )
    )


@pytest.fixture
def make_tiny_engine(tiny_llama: Path) -> Callable[..., Engine]:
    def make(**changes: Any) -> Engine:
        settings: dict[str, Any] = {
            "checkpoint": tiny_llama,
            "tokenizer": CharTokenizer(),
            "threads": 1,
            "num_slots": 4,
            "context_length": 256,
            "deterministic": False,
        }
        return create_local_engine(**{**settings, **changes})

    return make


@pytest.fixture(scope="session")
def load_reference() -> Callable[[Path], Any]:
    def load(folder: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return load


@pytest.fixture(scope="session")
def reference_logprobs() -> Callable[
    [Any, Sequence[NDArray[np.int32]], Sequence[Completion]], list[NDArray[np.float32]]
]:
    """Log-probabilities of responses by a transformers forward pass over prompts and responses."""

    def compute(
        model: Any, prompts: Sequence[NDArray[np.int32]], completions: Sequence[Completion]
    ) -> list[NDArray[np.float32]]:
        if len(prompts) > 8:
            return compute(model, prompts[:8], completions[:8]) + compute(model, prompts[8:], completions[8:])
        rows = [np.concatenate([prompt, each.token_ids]) for prompt, each in zip(prompts, completions, strict=True)]
        # What stands behind a row does not reach back into it.
        token_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for index, row in enumerate(rows):
            token_ids[index, : len(row)] = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            logprobs = model(token_ids, attention_mask=torch.ones_like(token_ids)).logits.float().log_softmax(dim=-1)
        picked = logprobs[:, :-1].gather(2, token_ids[:, 1:, None])[..., 0].numpy()
        return [picked[index, len(prompts[index]) - 1 : len(row) - 1] for index, row in enumerate(rows)]

    return compute


@pytest.fixture(scope="session")
def perturbed() -> Callable[[Any], dict[str, NDArray[np.float32]]]:
    """Weights a little beside those of a transformers model, for a weight update."""

    def make(model: Any) -> dict[str, NDArray[np.float32]]:
        generator = np.random.default_rng(7)
        state = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        return {
            name: (values * generator.normal(1.0, 0.02, values.shape)).astype(np.float32)
            for name, values in state.items()
        }

    return make


@pytest.fixture
def embedded_server(tiny_checkpoint: Path) -> Callable[..., AbstractAsyncContextManager[str]]:
    """Serve the tiny model with the embedded engine; gives the address."""

    @asynccontextmanager
    async def start(*, num_slots: int = 8, max_waiting: int = 64) -> AsyncIterator[str]:
        tokenizer = load_tokenizer(tiny_checkpoint)
        engine = create_local_engine(
            checkpoint=tiny_checkpoint,
            tokenizer=tokenizer,
            threads=1,
            num_slots=num_slots,
            context_length=256,
            deterministic=False,
        )
        model = ServedModel(
            model_path=str(tiny_checkpoint),
            name="tiny",
            created=0,
            config=json.loads((tiny_checkpoint / "config.json").read_text()),
            max_waiting=max_waiting,
        )
        async with (
            engine,
            serve(Service(engine, tokenizer=tokenizer, model=model), host="127.0.0.1", port=0) as address,
        ):
            yield address

    return start
