"""Models whose positions depend on pictures, or in which a picture's tokens see each other, see the same, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from rollfeed.config.train import TrainSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.testing import CharTokenizer
from rollfeed.training.trainer import Trainer
from rollfeed.types import Picture, PlaceholderRange, Sample, SamplingParams, VersionSpan

BEGIN, IMAGE, END, NUM_TOKENS = 101, 100, 102, 4
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen() -> Any:
    """Positions of three axes, which go on behind a picture by its longer side."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE, vision_start_token_id=BEGIN, vision_end_token_id=END, video_token_id=103,
    )  # fmt: skip


def gemma() -> Any:
    """Tokens of a picture see those of it that come later."""
    return transformers.Gemma3Config(
        text_config={**SIZES, "head_dim": 16, "sliding_window": 256},
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 4,
        },
        image_token_id=IMAGE, boi_token_index=BEGIN, eoi_token_index=END, mm_tokens_per_image=NUM_TOKENS,
    )  # fmt: skip


def qwen_pixels(random: np.random.Generator) -> dict[str, NDArray[Any]]:
    patches = random.standard_normal((16, 3 * 2 * 4 * 4)).astype(np.float32)
    return {"pixel_values": patches, "image_grid_thw": np.array([[1, 4, 4]], np.int64)}


def gemma_pixels(random: np.random.Generator) -> dict[str, NDArray[Any]]:
    return {"pixel_values": random.standard_normal((1, 3, 8, 8)).astype(np.float32)}


class Drawn:
    """A processor whose pictures are drawn from their hashes."""

    store: Any = None

    def __init__(self, pixels: Callable[[np.random.Generator], dict[str, NDArray[Any]]]) -> None:
        self._pixels = pixels

    def locate(self, token_ids: NDArray[np.int32], pictures: Sequence[Picture]) -> tuple[PlaceholderRange, ...]:
        starts = np.flatnonzero(token_ids == BEGIN)[: len(pictures)] + 1
        return tuple(PlaceholderRange(int(start), int(start) + NUM_TOKENS) for start in starts)

    def pixels(self, pictures: Sequence[Picture]) -> Mapping[str, NDArray[Any]]:
        found = [self._pixels(np.random.default_rng(int(each.content_hash))) for each in pictures]
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


MODELS = {"qwen2_5_vl": (qwen, qwen_pixels), "gemma3": (gemma, gemma_pixels)}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Drawn]:
    config, pixels = MODELS[request.param]
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(config())
    for parameter in made.parameters():  # so that what is small at the beginning is seen
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    return folder, Drawn(pixels)


@pytest.mark.parametrize("share_prompts", [False, True])
async def test_engine_and_trainer_agree(
    share_prompts: bool, model: tuple[Path, Drawn], sample_of: Callable[..., Sample], group_of: Any, batch_of: Any
) -> None:
    folder, processor = model
    pictures = [Picture(content_hash=str(n), media_type="image/png", width=16, height=16) for n in range(3)]
    picture = [BEGIN, *[IMAGE] * NUM_TOKENS, END]
    asked = [([3, *picture, 4, 5], pictures[:1]), ([*picture, 6, *picture, 7], pictures[1:]), ([3, 4, 5], [])]
    engine = create_local_engine(
        checkpoint=folder, tokenizer=CharTokenizer(), threads=1, num_slots=4, context_length=128, deterministic=False,
        pictures=processor,
    )  # fmt: skip
    groups = []
    async with engine:
        for index, (prompt, images) in enumerate(asked):
            ids = np.array(prompt, np.int32)
            params = [SamplingParams(max_new_tokens=6 + n, seed=n) for n in range(3)]
            found = await asyncio.gather(
                *(engine.generate(ids, each, request_id=str(n), images=images) for n, each in enumerate(params))
            )
            members = [
                replace(
                    sample_of(
                        prompt, c.token_ids.tolist(), logprobs=c.logprobs, index=n, rollout_id=n, group_index=index
                    ),
                    images=tuple(images),
                    version_spans=(VersionSpan(0, len(c.token_ids), 0),),
                )
                for n, c in enumerate(found)
            ]
            groups.append(group_of(index, [[member] for member in members]))
    trainer = Trainer(
        folder,
        settings=TrainSettings(device="cpu", threads=1, share_prompts=share_prompts, max_picture_mismatch_kl=1e-7),
        temperature=1.0,
        num_batches=1,
        max_response_length=16,
        pictures=processor,
    )
    samples = [rollout.samples[0] for group in groups for rollout in group.rollouts]
    for sample, logprobs in zip(samples, trainer.logprobs(samples), strict=True):
        np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-4)
    swapped = [replace(sample, images=sample.images[::-1]) for sample in samples[3:6]]
    assert np.abs(trainer.logprobs(swapped)[0] - samples[3].logprobs).max() > 1e-2
    trainer.train_step(batch_of(groups, [1.0, -1.0, 0.5] * 3))
    assert trainer._shares_pictures is False


async def test_a_prompt_is_answered_alike_whatever_was_asked_between(model: tuple[Path, Drawn]) -> None:
    folder, processor = model
    picture = Picture(content_hash="1", media_type="image/png", width=16, height=16)
    seeing = np.array([3, BEGIN, *[IMAGE] * NUM_TOKENS, END, 4, 5], np.int32)
    params = SamplingParams(max_new_tokens=6, seed=1)
    engine = create_local_engine(
        checkpoint=folder, tokenizer=CharTokenizer(), threads=1, num_slots=4, context_length=128, deterministic=False,
        pictures=processor,
    )  # fmt: skip
    async with engine:
        first = await engine.generate(seeing, params, request_id="a", images=[picture])
        await engine.generate(np.array([3, 4, 5], np.int32), params, request_id="b")
        again = await engine.generate(seeing, params, request_id="c", images=[picture])
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    np.testing.assert_allclose(first.logprobs, again.logprobs, atol=1e-5)
