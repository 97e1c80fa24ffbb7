"""Prompts with pictures: engine and trainer see the same, or the run stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from rollfeed.config import TinyModelSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.tiny_vision import tiny_vision_checkpoint
from rollfeed.errors import ConfigError, EngineProtocolError, RunFailedError
from rollfeed.prompts import load_tokenizer
from rollfeed.prompts.pictures import ModelPictures, PictureLoader
from rollfeed.prompts.pictures.picture_folder import PictureFolder
from rollfeed.training.supervised import Demonstration, SupervisedUpdates
from rollfeed.training.trainer import Trainer
from rollfeed.types import Picture, Sample, SamplingParams, TensorUpdate, VersionSpan

TINY = TinyModelSettings(
    characters="abc ?", words=["red", "blue"], hidden_size=32, num_layers=2, num_heads=2, image_size=16, patch_size=8
)
NUM_TOKENS = 4  # of a picture
PARAMS = SamplingParams(max_new_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_checkpoint(TINY, seed=0, cache_directory=tmp_path_factory.mktemp("models"))


class Seeing:
    """A processor of pictures, and prompts made with it."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.store = PictureFolder(kept)
        self.processor = ModelPictures(folder, self.store)
        self._loader = PictureLoader(self.store)

    def picture(self, *colour: int, size: tuple[int, int] = (16, 16)) -> Picture:
        return self._loader.load(Image.new("RGB", size, tuple(colour)))

    def prompt(self, text: str, *pictures: Picture) -> NDArray[np.int32]:
        return self.processor.expand(self.tokenizer.encode(text, add_special_tokens=False), pictures)

    def engine(self, processor: Any = None, **changes: Any) -> Any:
        options = {"threads": 1, "num_slots": 8, "context_length": 128, "deterministic": False, **changes}
        pictures = self.processor if processor is None else processor
        return create_local_engine(checkpoint=self.folder, tokenizer=self.tokenizer, pictures=pictures, **options)

    def trainer(self, **settings: Any) -> Trainer:
        values = {"device": "cpu", "threads": 1, "optimizer": {"learning_rate": 1e-2}, **settings}
        return Trainer(
            self.folder,
            settings=TrainSettings(**values),
            temperature=1.0,
            num_batches=4,
            max_response_length=24,
            pictures=self.processor,
        )


@pytest.fixture(scope="module")
def seeing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(folder, tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def red(seeing: Seeing) -> Picture:
    return seeing.picture(255, 0, 0)


@pytest.fixture
def blue(seeing: Seeing) -> Picture:
    return seeing.picture(0, 0, 255)


async def answers(
    engine: Any, prompt: NDArray[np.int32], pictures: Sequence[Picture], *, seeds: Sequence[int], **params: Any
) -> list[Any]:
    asked = [replace(PARAMS, seed=seed, **params) for seed in seeds]
    return await asyncio.gather(
        *(engine.generate(prompt, each, request_id=str(number), images=pictures) for number, each in enumerate(asked))
    )


@pytest.fixture
def sampled(sample_of: Callable[..., Sample]) -> Callable[..., Sample]:
    def sampled(prompt: NDArray[np.int32], pictures: Sequence[Picture], completion: Any, **changes: Any) -> Sample:
        sample = sample_of(prompt.tolist(), completion.token_ids.tolist(), logprobs=completion.logprobs, **changes)
        spans = (VersionSpan(0, len(completion.token_ids), 0),)
        return replace(sample, images=tuple(pictures), version_spans=spans)

    return sampled


def with_tower_calls(engine: Any) -> list[int]:
    """Count the passes through what sees, of an engine that has started."""
    calls: list[int] = []
    tower = engine._backend._model.model.vision_tower
    tower.register_forward_hook(lambda module, inputs, output: calls.append(len(output[0])))
    return calls


async def test_a_picture_is_encoded_once_a_group_and_the_engine_tells_what_it_saw(
    seeing: Seeing, red: Picture, blue: Picture
) -> None:
    prompt = seeing.prompt("a<image>b<image>?", red, blue)
    async with seeing.engine(num_slots=2) as engine:
        calls = with_tower_calls(engine)
        completions = await answers(engine, prompt, [red, blue], seeds=range(6))
        assert calls == [2]  # the two pictures at once, for three rounds of two
        told = [[(each.content_hash, each.start, each.end) for each in c.seen_pictures] for c in completions]
        assert told == [[(red.content_hash, 1, 5), (blue.content_hash, 6, 10)]] * 6
        assert (await answers(engine, prompt[:1], [], seeds=[0]))[0].seen_pictures == ()


async def test_equal_tokens_with_other_pictures_share_nothing(
    seeing: Seeing, red: Picture, blue: Picture, sampled: Callable[..., Sample]
) -> None:
    prompt = seeing.prompt("<image>?", red)
    assert np.array_equal(prompt, seeing.prompt("<image>?", blue))
    trainer = seeing.trainer()
    async with seeing.engine() as engine:
        found = await asyncio.gather(
            *(answers(engine, prompt, [each], seeds=[1, 2]) for each in (red, blue, red, blue))
        )
    for picture, other, completions in zip((red, blue, red, blue), (blue, red, blue, red), found, strict=True):
        samples = [sampled(prompt, [picture], each, index=n) for n, each in enumerate(completions)]
        for sample, logprobs in zip(samples, trainer.logprobs(samples), strict=True):
            np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-4)
        swapped = [replace(sample, images=(other,)) for sample in samples]
        assert np.abs(trainer.logprobs(swapped)[0] - samples[0].logprobs).max() > 1e-3


async def test_an_answer_goes_on_with_its_pictures_and_with_placeholders_that_were_sampled(
    seeing: Seeing, red: Picture, sampled: Callable[..., Sample]
) -> None:
    prompt = seeing.prompt("a<image>?", red)
    placeholder = int(prompt[1])
    async with seeing.engine() as engine:
        begun = await answers(engine, prompt, [red], seeds=range(8), temperature=3.0)
        assert sum(int((each.token_ids == placeholder).any()) for each in begun) > 1
        longer = [np.concatenate([prompt, each.token_ids]) for each in begun]
        rest = [(await answers(engine, ids, [red], seeds=[n]))[0] for n, ids in enumerate(longer)]
        assert all(each.seen_pictures[0][1:] == (1, 5) for each in rest)
    samples = [sampled(ids, [red], each, index=n) for n, (ids, each) in enumerate(zip(longer, rest, strict=True))]
    for sample, logprobs in zip(samples, seeing.trainer().logprobs(samples), strict=True):
        np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-4)


async def test_a_picture_may_end_a_prompt(seeing: Seeing, red: Picture, sampled: Callable[..., Sample]) -> None:
    prompt = seeing.prompt("a<image>", red)
    async with seeing.engine() as engine:
        completions = await answers(engine, prompt, [red], seeds=range(3))
    samples = [sampled(prompt, [red], each, index=n) for n, each in enumerate(completions)]
    for sample, logprobs in zip(samples, seeing.trainer().logprobs(samples), strict=True):
        np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-4)


@pytest.mark.parametrize("share_prompts", [False, True])
async def test_logprobs_of_trainer_and_engine_agree_over_updates(
    share_prompts: bool, seeing: Seeing, red: Picture, blue: Picture, sampled: Any, group_of: Any, batch_of: Any
) -> None:
    trainer = seeing.trainer(share_prompts=share_prompts, max_picture_mismatch_kl=1e-6)
    asked = [("a<image>?", [red]), ("<image>b<image>?", [blue, red]), ("abc?", []), ("a<image>?", [blue])]
    async with seeing.engine() as engine:
        for version in range(3):
            groups = []
            for index, (text, pictures) in enumerate(asked):
                prompt = seeing.prompt(text, *pictures)
                completions = await answers(engine, prompt, pictures, seeds=range(10 * version, 10 * version + 4))
                members = [
                    [sampled(prompt, pictures, each, index=4 * index + n, rollout_id=n, group_index=index)]
                    for n, each in enumerate(completions)
                ]
                groups.append(group_of(index, members))
            report = trainer.train_step(batch_of(groups, [1.0, -1.0] * 8))
            metrics = report.metrics
            assert metrics["train/mismatch_abs_max"] < 1e-4
            assert metrics["train/picture_mismatch_kl"] < 1e-6
            lengths = [len(m.samples[0].response_token_ids) for g in groups for m in g.rollouts]
            assert metrics["train/picture_tokens"] == sum(lengths) - sum(lengths[8:12])
            await engine.apply(TensorUpdate(trainer.weights(), policy_version=version + 1))
    prompts = [len(seeing.prompt(text, *pictures)) for text, pictures in asked]
    expected = sum(lengths) - len(lengths) + sum(prompts) * (1 if share_prompts else 4)
    assert metrics["train/computed_tokens"] == expected


async def test_pictures_that_come_in_mid_episode_have_their_places(
    seeing: Seeing, red: Picture, blue: Picture, sampled: Any
) -> None:
    first = seeing.prompt("a<image>?", red)
    async with seeing.engine() as engine:
        turn = (await answers(engine, first, [red], seeds=[1], max_new_tokens=5))[0]
        told = seeing.prompt("b<image>?", blue)
        second = np.concatenate([first, turn.token_ids, told])
        last = (await answers(engine, second, [red, blue], seeds=[2], max_new_tokens=5))[0]
    response = np.concatenate([turn.token_ids, told, last.token_ids])
    logprobs = np.concatenate([turn.logprobs, np.zeros(len(told), np.float32), last.logprobs])
    num_first, num_last = len(turn.token_ids), len(last.token_ids)
    mask = np.array([1.0] * num_first + [0.0] * len(told) + [1.0] * num_last, np.float32)
    whole = replace(turn, token_ids=response, logprobs=logprobs, version_spans=(VersionSpan(0, len(response), 0),))
    sample = replace(sampled(first, [red, blue], whole), loss_mask=mask)
    cut = replace(sample, loss_mask=np.where(np.arange(len(mask)) < num_first, mask, 0.0).astype(np.float32), index=1)
    trainer = seeing.trainer()
    both, short = trainer.logprobs([sample, cut])
    np.testing.assert_allclose(both, logprobs, atol=1e-4)
    np.testing.assert_allclose(short[:num_first], logprobs[:num_first], atol=1e-4)


class Broken:
    """A processor that shows the model something else than it was given."""

    def __init__(self, own: ModelPictures, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._own, self._change, self.store = own, change, own.store
        self.locate, self.expand, self.collapse = own.locate, own.expand, own.collapse

    def pixels(self, pictures: Sequence[Picture]) -> Mapping[str, NDArray[Any]]:
        return self._change(self._own.pixels(pictures))


CHANGES: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "removed": lambda pixels: {"pixel_values": np.zeros_like(pixels["pixel_values"])},
    "swapped": lambda pixels: {"pixel_values": np.ascontiguousarray(pixels["pixel_values"][::-1])},
    "resized": lambda pixels: {"pixel_values": np.repeat(np.repeat(pixels["pixel_values"][..., :8, :8], 2, 2), 2, 3)},
    "doubled": lambda pixels: {"pixel_values": np.repeat(pixels["pixel_values"][:1], 2, axis=0)},
    "none": lambda pixels: pixels,
}


@pytest.mark.parametrize("change", CHANGES)
async def test_training_stops_where_the_engine_saw_other_pixels(
    change: str, seeing: Seeing, red: Picture, sampled: Any, group_of: Any, batch_of: Any
) -> None:
    halves = seeing._loader.load(
        Image.fromarray(np.repeat([[[0, 255, 0]], [[0, 0, 255]]], 8, 0).repeat(16, 1).astype(np.uint8))
    )
    pictures = [red, halves]
    prompt = seeing.prompt("<image><image>?", *pictures)
    async with seeing.engine(Broken(seeing.processor, CHANGES[change])) as engine:
        completions = await answers(engine, prompt, pictures, seeds=range(8))
    samples = [[sampled(prompt, pictures, each, index=n, rollout_id=n)] for n, each in enumerate(completions)]
    batch = batch_of([group_of(0, samples)], [1.0, -1.0] * 4)
    trainer = seeing.trainer(max_picture_mismatch_kl=1e-8)
    before = {name: values.clone() for name, values in trainer.weights().items()}
    if change == "none":
        assert trainer.train_step(batch).metrics["train/picture_mismatch_kl"] < 1e-9
        return
    with pytest.raises(RunFailedError, match=r"picture_mismatch_kl.*not seen the same pictures.*nothing was changed"):
        trainer.train_step(batch)
    assert all(torch.equal(values, before[name]) for name, values in trainer.weights().items())
    unguarded = seeing.trainer(max_picture_mismatch_kl=0.0)
    assert unguarded.train_step(batch).metrics["train/picture_mismatch_kl"] > 1e-8


def test_what_is_frozen_stays_and_the_rest_learns(
    seeing: Seeing, red: Picture, sample_of: Any, group_of: Any, batch_of: Any
) -> None:
    trainer = seeing.trainer(freeze_params=[r"vision_tower", r"embed_tokens"], max_picture_mismatch_kl=0.0)
    before = {name: values.clone() for name, values in trainer.weights().items()}
    prompt = seeing.prompt("<image>?", red).tolist()
    samples = [[replace(sample_of(prompt, [n + 2], index=n, rollout_id=n), images=(red,))] for n in range(2)]
    trainer.train_step(batch_of([group_of(0, samples)], [1.0, -1.0]))
    after = trainer.weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    frozen = {name for name in before if "vision_tower" in name or "embed_tokens" in name}
    assert frozen
    assert changed == before.keys() - frozen


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["vision_towr"], "'vision_towr' matches no parameter of the model .model.vision_tower"),
        (["."], "nothing is left to train"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(patterns: list[str], message: str, seeing: Seeing) -> None:
    with pytest.raises(ConfigError, match=message):
        seeing.trainer(freeze_params=patterns)


def test_demonstrations_of_pictures_are_learned(seeing: Seeing, red: Picture, blue: Picture) -> None:
    trainer = seeing.trainer()
    updates = SupervisedUpdates(trainer.policy, learning_rate=3e-3, micro_batch_tokens=256)
    prompt, ends = seeing.prompt("<image>?", red), seeing.tokenizer.eos_token_ids
    words = {red: "red", blue: "blue"}
    taught = [
        Demonstration(
            prompt, np.array([*seeing.tokenizer.encode(word, add_special_tokens=False), *ends], np.int32), (it,)
        )
        for it, word in words.items()
    ]
    losses = [updates.update(taught * 4) for _ in range(40)]
    # Half of what is to be said depends on the picture alone: without it the loss stays at ln(2) / 2.
    assert losses[-1] < 0.1 < losses[0]


async def test_what_cannot_be_seen_is_refused(seeing: Seeing, red: Picture, tmp_path: Path, sample_of: Any) -> None:
    prompt = seeing.prompt("<image>?", red)
    async with seeing.engine() as engine:
        with pytest.raises(EngineProtocolError, match=r"do not go together.*no place for picture 2 of 2"):
            await engine.generate(prompt, PARAMS, request_id="0", images=[red, red])
        engine._pictures = None
        with pytest.raises(EngineProtocolError, match="takes text only"):
            await engine.generate(prompt, PARAMS, request_id="0", images=[red])
    trainer = seeing.trainer()
    with pytest.raises(ConfigError, match=r"sample 3.*do not go together"):
        trainer.logprobs([replace(sample_of([2, 3], [4], index=3), images=(red,))])
    trainer.policy.pictures = None
    with pytest.raises(ConfigError, match="sample 0 has pictures, and the model that is trained takes text only"):
        trainer.logprobs([replace(sample_of(prompt.tolist(), [4]), images=(red,))])
