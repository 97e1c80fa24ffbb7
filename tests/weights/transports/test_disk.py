"""Folders of new weights: what is in them, and in which form."""

from __future__ import annotations

import fcntl
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollfeed.errors import EngineProtocolError
from rollfeed.weights import DiskTransport, write_checkpoint

BESIDE = {
    "config.json": '{"dtype": "bfloat16"}',
    "generation_config.json": "{}",
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "own.tiktoken": "IQ== 0",
    "modeling_own.py": "answer = 42",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}
OF_OTHER_WEIGHTS = ("adapter_config.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "notes.md")
TENSORS = {
    "weight": torch.linspace(-1, 1, 6, dtype=torch.bfloat16).reshape(2, 3),
    "bias": torch.linspace(0, 1, 3),
    "half": torch.linspace(2, 3, 2, dtype=torch.float16),
    "table": torch.tensor([3, 1], dtype=torch.int64),
    "of_drafts": torch.ones(4, dtype=torch.bfloat16),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name, text in BESIDE.items():
        (folder / name).write_text(text)
    for name in OF_OTHER_WEIGHTS:
        (folder / name).write_text("{}")
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def folders(checkpoint: Path) -> Iterator[DiskTransport]:
    made = DiskTransport(None, checkpoint=checkpoint)
    yield made
    made.close()


def trained() -> dict[str, torch.Tensor]:
    found = {name: tensor * 2 for name, tensor in TENSORS.items() if name != "of_drafts"}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def test_what_is_published_has_the_types_of_the_checkpoint(folders: DiskTransport) -> None:
    folder = folders.write(trained(), policy_version=3)
    found = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in TENSORS.items() if name != "of_drafts"
    }
    assert all(torch.equal(found[name], TENSORS[name] * 2) for name in found)


def test_numpy_arrays_are_published_as_tensors_of_torch_are(folders: DiskTransport) -> None:
    arrays = {name: tensor.numpy() for name, tensor in trained().items()}
    first, second = folders.write(trained(), policy_version=1), folders.write(arrays, policy_version=2)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_all_that_belongs_to_a_model_is_beside_its_weights_and_nothing_of_other_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    write_checkpoint(trained(), tmp_path / "model", checkpoint=checkpoint)
    found = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert found == {*BESIDE, "model.safetensors"}
    assert all((tmp_path / "model" / name).read_text() == text for name, text in BESIDE.items())


def test_a_model_that_is_left_has_the_tensors_that_were_not_trained_as_they_were(
    checkpoint: Path, tmp_path: Path
) -> None:
    write_checkpoint(trained(), tmp_path / "model", checkpoint=checkpoint)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    assert torch.equal(found["of_drafts"], TENSORS["of_drafts"])


def test_tied_weights_under_two_names_are_written_twice(folders: DiskTransport) -> None:
    weight = torch.ones(2, 3)
    found = load_file(folders.write({"weight": weight, "head": weight}, policy_version=1) / "model.safetensors")
    assert found["head"].dtype is torch.float32
    assert torch.equal(found["head"], found["weight"].float())


def test_some_tensors_of_a_checkpoint_in_several_files_are_in_those_that_hold_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(TENSORS)}
    for file in set(places.values()):
        save_file({name: TENSORS[name] for name in TENSORS if places[name] == file}, checkpoint / file)
    index = {"metadata": {"total_size": 1, "total_parameters": 17}, "weight_map": places}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = DiskTransport(tmp_path, checkpoint=checkpoint).write({"weight": torch.zeros(2, 3)}, policy_version=1)
    assert [path.name for path in folder.glob("*.safetensors")] == [places["weight"]]
    written = json.loads((folder / "model.safetensors.index.json").read_text())
    assert written == {
        "metadata": {"total_size": 12, "total_parameters": 17},
        "weight_map": {"weight": places["weight"]},
    }


def test_without_a_checkpoints_weights_tensors_are_as_they_are_given(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").unlink()
    for source in (checkpoint, None):
        folder = DiskTransport(tmp_path, checkpoint=source).write({"weight": np.ones(3)}, policy_version=1)
        assert load_file(folder / "model.safetensors")["weight"].dtype is torch.float64


def test_a_checkpoint_that_was_damaged_meanwhile_is_named(folders: DiskTransport, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(EngineProtocolError, match=r"weights of version 4 cannot be written: .*model\.safetensors has"):
        folders.write(trained(), policy_version=4)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
    ],
)
def test_a_tied_head_is_written_under_its_own_name_where_a_server_needs_it(embedding, head, tmp_path) -> None:
    stored = {embedding: torch.linspace(-1, 1, 6, dtype=torch.bfloat16).reshape(3, 2)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    made = DiskTransport(None, checkpoint=tmp_path, untied_head=True)
    written = load_file(made.write({embedding: stored[embedding].float() * 2}, policy_version=1) / "model.safetensors")
    made.close()
    assert written.keys() == {embedding, head}
    assert written[head].dtype == torch.bfloat16
    assert torch.equal(written[head], written[embedding])


def test_a_head_of_its_own_stays_as_it_is(tmp_path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(3, 2), "lm_head.weight": torch.ones(3, 2)}
    made = DiskTransport(None, checkpoint=None, untied_head=True)
    written = load_file(made.write(tensors, policy_version=1) / "model.safetensors")
    made.close()
    assert torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])


def test_what_a_killed_process_has_left_goes_and_what_another_one_uses_stays(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; import numpy as np;"
        "from rollfeed.weights import DiskTransport;"
        "print(DiskTransport(Path(sys.argv[1])).write({'w': np.ones(2)}, policy_version=1), flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    left, others = Path(told.stdout.strip()), tmp_path / "mine"
    others.mkdir()
    running = DiskTransport(tmp_path)
    assert left.is_dir()
    used = running.write({"w": np.ones(2)}, policy_version=1)
    assert not left.parent.exists()
    new = DiskTransport(tmp_path).write({"w": np.ones(2)}, policy_version=2)
    assert all(each.is_dir() for each in (used, new, others))
    assert new.parent != used.parent


def test_a_folder_that_another_process_takes_for_one_left_behind_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def late(lock: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        other.write({"w": np.ones(2)}, policy_version=1)  # it removes what nobody holds
        flock(lock, operation)

    other, transport = DiskTransport(tmp_path), DiskTransport(tmp_path)
    monkeypatch.setattr(fcntl, "flock", late)
    written = transport.write({"w": np.ones(2)}, policy_version=1)
    assert (written / "model.safetensors").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_version_that_is_published_twice_has_two_folders(folders: DiskTransport) -> None:
    first, second = (folders.write({"weight": torch.full((2, 3), x)}, policy_version=0) for x in (1.0, 2.0))
    assert first != second
    assert load_file(first / "model.safetensors")["weight"].max() == 1.0
    assert "version-0" in first.name


def test_a_full_disk_is_named_and_nothing_half_written_stays(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    folders = DiskTransport(tmp_path)
    folders.write({"weight": torch.ones(2, 3)}, policy_version=1)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
    try:
        with pytest.raises(EngineProtocolError, match=r"version 2 cannot be written: .*; make room in .*weights_fo"):
            folders.write({"weight": torch.ones(1 << 15)}, policy_version=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    root = folders.write({"weight": torch.ones(2, 3)}, policy_version=3).parent
    assert [path.name for path in root.iterdir() if "writing" in path.name or "version-2" in path.name] == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineProtocolError, match=r"no weights can be written to .*file: .*set weights_folder"):
        DiskTransport(tmp_path / "file").write({"w": np.ones(2)}, policy_version=1)
