"""Serving, training and reference checkpoints: what they may be, and FP8 servers of a model that is trained in FP32."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollfeed.app import prepare, train
from rollfeed.app.training.trained_checkpoints import trained_checkpoints
from rollfeed.cli.checking import check
from rollfeed.config import RunSpec, validate_settings
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.server import ServedModel, Service, serve
from rollfeed.errors import CheckpointError, ConfigError, EngineProtocolError
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.types import FolderUpdate, TensorUpdate
from rollfeed.weights.quantise_checkpoint import main, quantise_checkpoint
from rollfeed.weights.serving.fp8 import Fp8Tensor, dequantise, quantise

BLOCK = (16, 16)


@pytest.fixture(scope="session")
def fp8_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "tiny-fp8"
    quantise_checkpoint(tiny_checkpoint, folder, block=BLOCK)
    return folder


def settings(serving: Path, **train: Any) -> Any:
    tree = {
        "model": {"checkpoint": str(serving)},
        "prompts": {"environments": [{"id": "core/copy_text"}]},
        "engine": {"sglang": {"workers": ["http://127.0.0.1:1"]}},
        "train": train,
    }
    return validate_settings(tree, where="test", overrides=())


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_each_checkpoint_has_a_setting(tiny_checkpoint: Path, fp8_checkpoint: Path, tmp_path: Path) -> None:
    reference = Path(shutil.copytree(tiny_checkpoint, tmp_path / "reference"))
    loss = {"kl_coefficient": 0.1, "reference_checkpoint": str(reference)}
    given = settings(fp8_checkpoint, checkpoint=str(tiny_checkpoint), loss=loss)
    assert trained_checkpoints(given, fp8_checkpoint) == (tiny_checkpoint, reference)
    assert trained_checkpoints(settings(tiny_checkpoint), tiny_checkpoint) == (tiny_checkpoint, None)


def test_a_reference_without_a_divergence_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="reference_checkpoint has no effect with kl_coefficient = 0"):
        settings(tiny_checkpoint, loss={"reference_checkpoint": str(tiny_checkpoint)})


def test_a_reference_of_another_shape_is_not_refreshed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:4].clone()

    other = changed(tiny_checkpoint, tmp_path / "other", cut)
    loss = {"kl_coefficient": 0.1, "reference_checkpoint": str(other)}
    assert trained_checkpoints(settings(tiny_checkpoint, loss=loss), tiny_checkpoint).reference == other
    loss["reference_refresh_interval"] = 2
    with pytest.raises(CheckpointError, match=r"its weight 'model\.norm\.weight' is not that of what is trained"):
        trained_checkpoints(settings(tiny_checkpoint, loss=loss), tiny_checkpoint)
    loss["reference_checkpoint"] = str(shutil.copytree(tiny_checkpoint, tmp_path / "same"))
    trained_checkpoints(settings(tiny_checkpoint, loss=loss), tiny_checkpoint)


def test_a_model_in_fp8_is_served_and_not_trained(tiny_checkpoint: Path, fp8_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantised, and cannot be trained: set train\.checkpoint"):
        trained_checkpoints(settings(fp8_checkpoint), fp8_checkpoint)
    loss = {"kl_coefficient": 0.1, "reference_checkpoint": str(fp8_checkpoint)}
    with pytest.raises(CheckpointError, match=r"train\.loss\.reference_checkpoint: .* are quantised"):
        trained_checkpoints(settings(tiny_checkpoint, loss=loss), tiny_checkpoint)


def test_a_check_finds_it(tiny_checkpoint: Path, fp8_checkpoint: Path) -> None:
    spec = RunSpec(settings(fp8_checkpoint))
    with pytest.raises(CheckpointError, match=r"set train\.checkpoint to the same model in BF16"):
        check(spec, name="test", tells=False)
    assert check(RunSpec(settings(fp8_checkpoint, checkpoint=str(tiny_checkpoint))), name="test", tells=False)["trains"]


def test_a_form_that_cannot_be_published_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    serving = Path(shutil.copytree(tiny_checkpoint, tmp_path / "awq"))
    config = json.loads((serving / "config.json").read_text())
    (serving / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CheckpointError, match="cannot be published as 'awq'"):
        trained_checkpoints(settings(serving, checkpoint=str(tiny_checkpoint)), serving)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(33)


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.other.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "said"), [(widen, r"'model\.norm\.weight' has the shape \(33,\)"), (add, r"other\.weight' is not in")]
)
def test_another_model_is_refused_as_the_one_to_train(
    tiny_checkpoint: Path, tmp_path: Path, change: Any, said: str
) -> None:
    other = changed(tiny_checkpoint, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match=rf"train\.checkpoint: {other}: weight .*{said}"):
        trained_checkpoints(settings(tiny_checkpoint, checkpoint=str(other)), tiny_checkpoint)


def test_other_tokens_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_checkpoint, tmp_path / "other"))
    text = (other / "tokenizer.json").read_text().replace('"a":', '"aa":')
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"train\.checkpoint: .*its tokens are not those of model\.checkpoint"):
        trained_checkpoints(settings(tiny_checkpoint, checkpoint=str(other)), tiny_checkpoint)


def test_the_embedded_engine_refuses_fp8(fp8_checkpoint: Path) -> None:
    tree = {"model": {"checkpoint": str(fp8_checkpoint)}, "prompts": {"environments": [{"id": "core/copy_text"}]}}
    with pytest.raises(CheckpointError, match="in FP8, which only servers compute with"):
        prepare(RunSpec(validate_settings(tree, where="test", overrides=())))


def test_a_checkpoint_is_made_in_fp8_by_block_or_by_tensor(tiny_checkpoint: Path, tmp_path: Path) -> None:
    name, given = "model.layers.0.mlp.down_proj.weight", load_file(tiny_checkpoint / "model.safetensors")
    for block, suffix in ((16, "_scale_inv"), (0, "_scale")):
        main([str(tiny_checkpoint), str(tmp_path / str(block)), "--block", str(block)])
        made = load_file(tmp_path / str(block) / "model.safetensors")
        codes, scale = quantise(given[name], (block, block) if block else None)
        assert torch.equal(made[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(made[name + suffix].flatten(), scale.flatten())
        assert made["model.embed_tokens.weight"].dtype == given["model.embed_tokens.weight"].dtype
    with pytest.raises(CheckpointError, match="quantised already"):
        quantise_checkpoint(tmp_path / "0", tmp_path / "again")


def test_nothing_is_replaced_by_a_checkpoint_in_fp8(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(SystemExit, match=r"^error: .*model: is there already, and would be replaced"):
        main([str(source), str(source)])
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    (tmp_path / "empty").mkdir()
    main([str(source), str(tmp_path / "empty")])
    assert (tmp_path / "empty" / "model.safetensors").exists()


SETTINGS = """
seed = 1
[model]
checkpoint = "{serving}"
[[prompts.environments]]
id = "core/copy_text"
[rollout]
num_rollout = 3
rollout_batch_size = 4
n_samples_per_prompt = 2
[sampling]
rollout_max_response_len = 16
[engine]
context_length = 256
[engine.sglang]
workers = ["{address}"]
weights_folder = "{weights}"
[reward]
override_environments = true
[plugins]
reward = "made_reward:score"
[train]
threads = 1
checkpoint = "{training}"
optimizer.learning_rate = 1e-2
"""
REWARD = "def score(sample, prompt):\n    return float(sample.response_token_ids.sum() % 7)\n"


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    return {
        name: dequantise(Fp8Tensor(tensor, scales[f"{name}_scale_inv"]), BLOCK)
        if f"{name}_scale_inv" in scales
        else tensor.float()
        for name, tensor in tensors.items()
    }


@asynccontextmanager
async def fp8_server(checkpoint: Path, fp8: Path, *, keeps: Callable[[str], bool]) -> AsyncIterator[str]:
    """Serve a model that computes with the values of the FP8 folders that it is told to load."""
    tokenizer = load_tokenizer(checkpoint)
    engine: Any = create_local_engine(
        checkpoint=checkpoint, tokenizer=tokenizer, threads=1, num_slots=8, context_length=256, deterministic=False
    )
    apply = engine.apply

    async def load(update: FolderUpdate, **options: Any) -> None:
        tensors = {name: tensor for name, tensor in dequantised(update.folder).items() if not keeps(name)}
        await apply(TensorUpdate(tensors, policy_version=update.policy_version), **options)

    config = json.loads((checkpoint / "config.json").read_text())
    model = ServedModel(model_path=str(fp8), name="tiny", created=0, config=config, max_waiting=64)
    async with engine:
        await apply(TensorUpdate(dequantised(fp8), policy_version=0))
        engine.apply = load
        async with serve(Service(engine, tokenizer=tokenizer, model=model), host="127.0.0.1", port=0) as address:
            yield address


@pytest.fixture
def run(tiny_checkpoint: Path, fp8_checkpoint: Path, tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """Train a model in FP32 that a server has in FP8; ``keeps`` names what the server does not take."""

    async def run(keeps: Callable[[str], bool], outs: Sequence[str]) -> None:
        async with fp8_server(tiny_checkpoint, fp8_checkpoint, keeps=keeps) as address:
            text = SETTINGS.format(
                serving=fp8_checkpoint, training=tiny_checkpoint, address=address, weights=tmp_path / "weights"
            )
            (tmp_path / "train.toml").write_text(text)
            for out in outs:
                await train(prepare(RunSpec.load(tmp_path / "train.toml", ())), out=tmp_path / out)

    def call(
        keeps: Callable[[str], bool] = lambda name: False, outs: Sequence[str] = ("run",)
    ) -> list[dict[str, float]]:
        (tmp_path / "made_reward.py").write_text(REWARD)
        asyncio.run(run(keeps, outs))
        return [json.loads(line) for line in (tmp_path / outs[-1] / "metrics.jsonl").read_text().splitlines()]

    return call


def test_servers_in_fp8_are_trained_for_and_proved(run: Any, fp8_checkpoint: Path, tmp_path: Path) -> None:
    steps = run()
    assert steps[-1]["weights/proof_slope"] == pytest.approx(1.0, abs=0.01)
    # What the server computes with is exactly what the trainer takes it to.
    assert steps[-1]["weights/proof_noise"] < 1e-3
    left, stored = load_file(tmp_path / "run/model/model.safetensors"), load_file(fp8_checkpoint / "model.safetensors")
    assert {tensor.dtype for tensor in left.values()} == {torch.float32}
    newest = max((tmp_path / "weights").glob("*/version-3-*"))
    published = load_file(newest / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in published.items()} == {
        name: tensor.dtype for name, tensor in stored.items()
    }
    for name, tensor in left.items():
        if published[name].dtype == torch.float8_e4m3fn:
            assert torch.equal(published[name].view(torch.uint8), quantise(tensor, BLOCK).codes.view(torch.uint8))


def test_a_server_in_fp8_that_takes_nothing_is_found_out(run: Any) -> None:
    with pytest.raises(EngineProtocolError, match=r"version 1 is not what it has: .*weights as fp8"):
        run(lambda name: True)


def test_a_server_that_another_training_has_used_gets_the_weights_that_a_new_one_begins_with(
    run: Any, tmp_path: Path
) -> None:
    run(outs=("first", "second"))
    first, second = (
        json.loads((tmp_path / out / "train.jsonl").read_text().splitlines()[0])["train/mismatch_abs"]
        for out in ("first", "second")
    )
    assert second == pytest.approx(first, rel=0.05)  # that of FP8 alone
