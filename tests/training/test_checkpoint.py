from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rollfeed.base.atomic import DIGESTS
from rollfeed.errors import CheckpointError
from rollfeed.training.checkpoint import TENSORS_FILE, VALUES_FILE, TrainerState, read_state, write_state

STATE = TrainerState(
    tensors={"model/a": torch.arange(6.0).reshape(2, 3), "exp_avg/a": torch.zeros(2, 3)},
    values={"step": 3, "settings": {"loss": {"clip_low": 0.2}}},
)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_state(STATE, tmp_path / "deep" / "state")
    read = read_state(tmp_path / "deep" / "state")
    assert read.values == STATE.values
    assert read.tensors.keys() == STATE.tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in STATE.tensors.items())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["state"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    write_state(STATE, tmp_path / "state")
    before = (tmp_path / "state" / VALUES_FILE).read_bytes()
    with pytest.raises(CheckpointError, match="never written over"):
        write_state(TrainerState(tensors={}, values={}), tmp_path / "state")
    assert (tmp_path / "state" / VALUES_FILE).read_bytes() == before


def test_what_an_interrupted_write_left_is_no_state_and_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".state.tmp").mkdir()
    (tmp_path / ".state.tmp" / TENSORS_FILE).write_bytes(b"half")
    with pytest.raises(CheckpointError, match="no readable state"):
        read_state(tmp_path / "state")
    write_state(STATE, tmp_path / "state")
    assert read_state(tmp_path / "state").values == STATE.values


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_state(STATE, tmp_path / "file" / "state")


@pytest.mark.parametrize("file", [TENSORS_FILE, VALUES_FILE])
def test_damaged_files_are_named(tmp_path: Path, file: str) -> None:
    write_state(STATE, tmp_path / "state")
    whole = (tmp_path / "state" / file).read_bytes()
    (tmp_path / "state" / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=rf"{file}: is damaged"):
        read_state(tmp_path / "state")
    (tmp_path / "state" / DIGESTS).unlink()  # as what earlier versions wrote
    with pytest.raises(CheckpointError, match="no readable state"):
        read_state(tmp_path / "state")


@pytest.mark.parametrize("text", ["[]", "{}", json.dumps({"format": 99})])
def test_another_format_is_refused(tmp_path: Path, text: str) -> None:
    write_state(STATE, tmp_path / "state")
    (tmp_path / "state" / VALUES_FILE).write_text(text)
    (tmp_path / "state" / DIGESTS).unlink()
    with pytest.raises(CheckpointError, match="is not 1, the one that is read here"):
        read_state(tmp_path / "state")
