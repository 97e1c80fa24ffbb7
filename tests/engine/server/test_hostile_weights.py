"""Weights of every type that PyTorch has, and values that no type here holds: an error of that update only."""

from __future__ import annotations

import asyncio
import json
import math
import struct
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rollfeed.base.tensor_buckets import bucket_text, make_buckets
from rollfeed.engine.local import create_local_engine
from rollfeed.errors import EngineProtocolError
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.types import FolderUpdate, SamplingParams, TensorUpdate

NAME = "model.norm.weight"
ALLOWED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
FOLDER_TYPES = ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F8_E4M3", "F8_E5M2", "F8_E8M0"]
FOLDER_TYPES += ["F4", "F6_E2M3", "F6_E3M2", "C64", "F128", "", "BF16\x00", "NaN"]


def of_type(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor of a type; None where there can be no plain one of it."""
    with warnings.catch_warnings(action="ignore"), suppress(RuntimeError, TypeError):
        return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)
    return None


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda ones: ones * float("nan"),
    "infinity": lambda ones: ones / 0.0,
    "minus infinity": lambda ones: -ones / 0.0,
    "too large for float32": lambda ones: ones.double() * 1e300,
    "one of them": lambda ones: torch.cat([ones[:-1], ones[-1:] * float("nan")]),
    "just too large": lambda ones: ones.double() * 3.4028236e38,
    "another shape": lambda ones: ones[:-1],
    "no shape": lambda ones: ones[0],
    "repeated without memory": lambda ones: ones[:1].expand(1 << 40),
}


def write_folder(path: Path, checkpoint: Path, dtype: str, content: bytes, shape: list[int]) -> Path:
    """A whole checkpoint whose last norm is written by hand."""
    tensors = {name: values for name, values in load_file(checkpoint / "model.safetensors").items() if name != NAME}
    header, offset, parts = dict[str, Any](), 0, []
    for name, values in tensors.items():
        parts.append(values.tobytes())
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [offset, offset + len(parts[-1])]}
        offset += len(parts[-1])
    header[NAME] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(content)]}
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts) + content)
    (path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return path


async def greedy(client: Any) -> Any:
    reply = await client.generate(list(range(40, 60)), max_new_tokens=8, temperature=0.0, ignore_eos=True)
    return reply["output_ids"], reply["meta_info"]["output_token_logprobs"]


async def test_x02_weights_of_every_type_over_http_are_taken_or_refused_and_the_old_ones_serve(serving: Any) -> None:
    async with serving() as client:
        size = client.service.engine.shapes[NAME][0]
        before = await greedy(client)

        async def send(tensor: torch.Tensor) -> tuple[int, str]:
            (bucket,) = make_buckets([(NAME, tensor.contiguous())], most_bytes=1 << 30)
            body = {"serialized_named_tensors": [bucket_text(bucket)], "load_format": "flattened_bucket"}
            statuses = []
            for path, given in (
                ("/begin_weight_update", {}),
                ("/update_weights_from_tensor", {**body, "weight_version": "9"}),
                ("/end_weight_update", {}),
            ):
                async with client.session.post(client.address + path, json=given) as response:
                    statuses.append(response.status)
                    text = await response.text()
            return max(statuses), text

        refused = 0
        for dtype in DTYPES:
            tensor = of_type(dtype, (size,))
            if tensor is None or dtype in ALLOWED:
                continue
            status, text = await send(tensor)
            assert status == 400, (dtype, text)
            refused += 1
            assert await greedy(client) == before, dtype
        assert refused >= 12
        for how, spoil in SPOILT.items():
            spoilt = spoil(torch.ones(size))
            if spoilt.numel() <= size:
                assert (await send(spoilt))[0] == 400, how
        assert await greedy(client) == before
        assert (await client.get("/model_info"))["weight_version"] == "default"
        for dtype in ALLOWED:
            assert (await send(torch.full((size,), 0.5, dtype=dtype)))[0] == 200, dtype
        assert (await greedy(client))[1] != before[1]


async def test_x02_weights_of_every_type_in_a_folder_are_refused_and_the_old_ones_serve(
    serving: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    async with serving() as client:
        (size,) = client.service.engine.shapes[NAME]
        before = await greedy(client)
        made = [(dtype, bytes(size * 4), [size]) for dtype in FOLDER_TYPES]
        made += [(dtype, bytes(size * width), [size]) for dtype, width in (("BOOL", 1), ("F8_E4M3", 1), ("C64", 8))]
        made += [("F64", np.full(size, 1e300).tobytes(), [size]), ("F64", np.full(size, np.nan).tobytes(), [size])]
        made += [("F32", np.full(size, -np.inf, np.float32).tobytes(), [size]), ("F32", bytes(4 * size), [size + 1])]
        made += [("F32", bytes(4 * size), shape) for shape in ([2**63], [-1], [2**32, 2**32], [size, 0], [])]
        for number, (dtype, content, shape) in enumerate(made):
            folder = write_folder(tmp_path / str(number), tiny_checkpoint, dtype, content, shape)
            reply = await client.post("/update_weights_from_disk", {"model_path": str(folder)}, status=400)
            assert "Failed to update weights" in reply["message"], (dtype, shape)
        assert await greedy(client) == before
        good = write_folder(tmp_path / "good", tiny_checkpoint, "F64", np.full(size, 0.5).tobytes(), [size])
        await client.post("/update_weights_from_disk", {"model_path": str(good), "weight_version": "2"})
        assert (await greedy(client))[1] != before[1]


@pytest.mark.parametrize("kernels", ["native", "torch", "transformers"])
async def test_x02_every_backend_refuses_what_it_cannot_hold(
    tiny_checkpoint: Path, save_tiny: Any, tmp_path: Path, kernels: str
) -> None:
    import transformers

    checkpoint = tiny_checkpoint
    if kernels == "transformers":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 128}
        checkpoint = save_tiny(transformers.GPT2Config(vocab_size=259, bos_token_id=1, eos_token_id=2, **sizes))
    options = {} if kernels == "transformers" else {"kernels": kernels}
    engine = create_local_engine(
        checkpoint=checkpoint,
        tokenizer=load_tokenizer(tiny_checkpoint),
        threads=1,
        num_slots=2,
        context_length=64,
        deterministic=False,
        **options,
    )
    params, prompt = SamplingParams(max_new_tokens=4, temperature=0.0), np.arange(40, 50, dtype=np.int32)
    async with engine:
        name, shape = next((name, shape) for name, shape in engine.shapes.items() if len(shape) == 1)
        before = await engine.generate(prompt, params, request_id="before")
        ones = torch.ones(shape)
        tensors = [spoil(ones) for spoil in SPOILT.values()]
        tensors += [made for dtype in DTYPES if dtype not in ALLOWED and (made := of_type(dtype, shape)) is not None]
        tensors += [torch.sparse_coo_tensor(size=shape, check_invariants=True), torch.empty(shape, device="meta")]
        for tensor in tensors:
            with pytest.raises(EngineProtocolError, match="weight"):
                await engine.apply(TensorUpdate({name: tensor}, policy_version=5))
        with pytest.raises(EngineProtocolError, match="cannot be read"):
            await engine.apply(FolderUpdate(tmp_path / "none", policy_version=5))
        after = await engine.generate(prompt, params, request_id="after")
    assert engine.policy_version == 0
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tobytes() == before.logprobs.tobytes()


async def test_groups_whose_publisher_does_not_come_keep_nothing_else_waiting(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, all_wait, goes, waiting = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), list[Any]()

    def connect(*about: Any, **_: Any) -> None:
        waiting.append(about)
        if len(waiting) == 40:  # more than loops have threads
            loop.call_soon_threadsafe(all_wait.set)
        goes.wait(300)
        raise RuntimeError("nobody has come")

    monkeypatch.setattr("rollfeed.base.update_group.connect", connect)
    place = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    try:
        async with serving() as client, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number in range(40):
                body = {**place, "group_name": str(number)}
                tasks.create_task(client.post("/init_weights_update_group", body, status=400))
            await all_wait.wait()
            goes.set()
    finally:
        goes.set()
