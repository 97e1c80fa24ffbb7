"""A real server on a loopback port, over a tiny random model or the real one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

import rollfeed
from rollfeed.engine.backends.backend import Backend
from rollfeed.engine.backends.batching import ContinuousBatcher
from rollfeed.engine.backends.transformers import TransformersBackend
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.server import ServedModel, Service, serve
from rollfeed.prompts.tokenizer import load_tokenizer


class Client:
    """What the tests say to a server."""

    def __init__(self, session: aiohttp.ClientSession, address: str, service: Service | None) -> None:
        self.session = session
        self.address = address
        self.service = service

    async def get(self, path: str) -> Any:
        async with self.session.get(self.address + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        async with self.session.post(self.address + path, json=body) as response:
            assert response.status == status, await response.text()
            text = await response.text()
            return json.loads(text) if response.content_type == "application/json" else text

    async def generate(self, input_ids: Any, *, status: int = 200, top: Any = None, **sampling: Any) -> Any:
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **(top or {})}
        return await self.post("/generate", body, status=status)

    async def events(self, path: str, body: Any) -> list[Any]:
        """The JSON values of a stream, which must end as it should."""
        async with self.session.post(self.address + path, json={**body, "stream": True}) as response:
            assert response.content_type == "text/event-stream", await response.text()
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def until(self, condition: Callable[[Any], bool]) -> None:
        """Ask for the load until it is as expected."""
        while not condition((await self.get("/v1/loads?include=core"))["loads"][0]):
            pass

    async def until_idle(self) -> None:
        await self.until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)


class Device:
    """What servers compute on: tokens take longer and longer where a test has to do something before the last one."""

    def __init__(self) -> None:
        self._is_fast = threading.Event()
        self._is_fast.set()
        self._num_tokens = 0

    def slow_down(self) -> None:
        self._num_tokens = 0
        self._is_fast.clear()

    def speed_up(self) -> None:
        self._is_fast.set()

    def take_its_time(self) -> None:
        self._num_tokens += 1
        self._is_fast.wait(min(0.005 * self._num_tokens, 0.2))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device of the servers of a test; it is fast until it is slowed down."""
    made = Device()

    def timed(step: Callable[[Any, Callable[[], None]], None]) -> Callable[[Backend, Callable[[], None]], None]:
        def take(backend: Backend, between_tokens: Callable[[], None]) -> None:
            def between() -> None:
                made.take_its_time()
                between_tokens()

            step(backend, between)
            made.take_its_time()

        return take

    for kind in (ContinuousBatcher, TransformersBackend):
        monkeypatch.setattr(kind, "step", timed(kind.step))
    return made


Serving = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture(scope="session")
def serving(tiny_checkpoint: Path) -> Serving:
    """Serve the tiny model, or another one."""

    @asynccontextmanager
    async def start(
        *,
        checkpoint: Path = tiny_checkpoint,
        tokenizer_folder: Path | None = None,
        num_slots: int = 4,
        context_length: int = 256,
        max_waiting: int = 64,
        deterministic: bool = False,
    ) -> AsyncIterator[Client]:
        tokenizer = load_tokenizer(tokenizer_folder or checkpoint)
        engine = create_local_engine(
            checkpoint=checkpoint,
            tokenizer=tokenizer,
            threads=1,
            num_slots=num_slots,
            context_length=context_length,
            deterministic=deterministic,
        )
        model = ServedModel(
            model_path=str(checkpoint),
            name="tiny",
            created=0,
            config=json.loads((checkpoint / "config.json").read_text()),
            max_waiting=max_waiting,
        )
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with engine, aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            service = Service(engine, tokenizer=tokenizer, model=model)
            async with serve(service, host="127.0.0.1", port=0) as address:
                yield Client(session, address, service)

    return start


class ClientOfAnother(Client):
    """What the tests say to a server in a process of its own, and what they know of that."""

    def __init__(self, session: aiohttp.ClientSession, address: str, process_id: int) -> None:
        super().__init__(session, address, None)
        self.process_id = process_id
        self.log = ""
        """What it has logged since it listened; filled in when it has ended."""


@pytest.fixture
def serving_apart(tiny_checkpoint: Path) -> Callable[..., AbstractAsyncContextManager[ClientOfAnother]]:
    """Serve the tiny model in a process of its own; options are named as on the command line."""

    @asynccontextmanager
    async def start(**options: int) -> AsyncIterator[ClientOfAnother]:
        arguments = ["-m", "rollfeed", "serve", "engine", "--model", str(tiny_checkpoint), "--port", "0"]
        arguments += ["--threads", "1"]
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            env={**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            before = line = ""  # what it says of the machine comes first
            while not line.startswith("serving "):
                line = (await process.stderr.readline()).decode()
                assert line, before
                before += line
            timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                client = ClientOfAnother(session, line.split()[-1], process.pid)
                yield client
            process.terminate()
            client.log = (await process.stderr.read()).decode()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    return start


@pytest.fixture(scope="session")
def other_weights(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights of the tiny model's shapes and other values."""
    folder = tmp_path_factory.mktemp("weights")
    generator = np.random.default_rng(1)
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    save_file(
        {
            name: (values * generator.normal(1.0, 0.3, values.shape)).astype(np.float32)
            for name, values in tensors.items()
        },
        folder / "model.safetensors",
    )
    return folder


TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}
{{- {"user": "\\n", "tool": "\\t"}.get(messages[-1].role, "\\r") }}{% endif %}"""
ANSWERS = {
    "\n": [
        *(
            "hm, ",
            "hm",
            "</think>",
            "\n\nLet ",
            "me see.",
            "\n<tool_call>",
            '\n{"name": "add",',
            ' "arguments": {"a": 1}}',
        ),
        *("\n</tool_call>", "\n<tool_call>\n<function=add>", "\n<parameter=a>2</parameter></function></tool_call>"),
    ],
    "\t": ["ok", "</think>\n", "It", " is", " 3."],
}
"""What is said where a prompt ends with a character: every piece is a token, and all of them differ."""


@pytest.fixture(scope="session")
def speaking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows which token follows which: to users it calls a tool twice, and it knows answers of tools."""
    folder = tmp_path_factory.mktemp("speaking")
    characters = [chr(code) for code in [*range(9, 11), 13, *range(32, 127)]]
    pieces = [piece for answer in ANSWERS.values() for piece in answer]
    names = ["<end>", "<unknown>", *characters, *pieces]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel({name: ids[name] for name in names[: -len(pieces)]}, unk_token="<unknown>"))
    tokenizer.add_special_tokens(names[:2])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unknown>"}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    width, size = 64, len(names)
    config: dict[str, Any] = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": width},
        **{"intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        **{"max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float32"},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    inputs = np.random.default_rng(0).standard_normal((size, width)).astype(np.float32)
    outputs = np.zeros((size, width), np.float32)
    for opening, answer in ANSWERS.items():
        chain = [opening, *answer, "<end>"]
        for before, after in pairwise(chain):
            outputs[ids[after]] += inputs[ids[before]]
    nothing = np.zeros((width, width), np.float32)
    tensors = {"model.embed_tokens.weight": inputs, "lm_head.weight": outputs, "model.norm.weight": np.ones(width)}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
        tensors[f"model.layers.0.{name}.weight"] = nothing
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] = nothing
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{name}.weight"] = np.ones(width)
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder
