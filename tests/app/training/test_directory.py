"""The model that training leaves: whole, and loadable; or the one before."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

from rollfeed.app.training.directory import export_model
from rollfeed.config.train import TrainSettings
from rollfeed.errors import RunFailedError
from rollfeed.prompts import load_tokenizer
from rollfeed.training.trainer import Trainer


@pytest.fixture
def trainer(tiny_checkpoint: Path) -> Trainer:
    made = Trainer(
        tiny_checkpoint, settings=TrainSettings(device="cpu"), temperature=1.0, num_batches=1, max_response_length=4
    )
    with torch.no_grad():
        for tensor in made.weights().values():
            tensor.mul_(1.5)
    return made


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_exported_model_has_the_weights_and_the_tokenizer(
    trainer: Trainer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    export_model(trainer, tmp_path, checkpoint=tiny_checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in trainer.weights().items())
    theirs, ours = load_tokenizer(tiny_checkpoint), load_tokenizer(tmp_path / "model")
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert (
        ours.encode("one\ntwo", add_special_tokens=False).tolist()
        == theirs.encode("one\ntwo", add_special_tokens=False).tolist()
    )


def test_the_exported_model_has_the_chat_template_that_it_was_trained_with(
    trainer: Trainer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    export_model(trainer, tmp_path / "out", checkpoint=tiny_checkpoint, chat_template=str(tmp_path / "own.jinja"))
    assert load_tokenizer(tmp_path / "out" / "model").render_chat([{"role": "user", "content": "hi"}]) == "[hi]"


def test_it_replaces_the_one_that_is_there_and_what_a_kill_left(
    trainer: Trainer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("model", ".model.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old.txt").touch()
    export_model(trainer, tmp_path, checkpoint=tiny_checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "old.txt").exists()


@pytest.mark.parametrize("num_bytes", [10, 30_000])  # too few for the configuration, and for the weights
def test_a_full_disk_is_named_and_leaves_the_model_that_was_there(
    trainer: Trainer, tiny_checkpoint: Path, tmp_path: Path, num_bytes: int
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old.txt").touch()
    with files_of_at_most(num_bytes), pytest.raises(RunFailedError, match=r"model cannot be written: .*File too large"):
        export_model(trainer, tmp_path, checkpoint=tiny_checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "old.txt").exists()
