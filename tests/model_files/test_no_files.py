"""What has the name of a file and is none is refused before anybody waits for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollfeed.base.atomic import NotRegularError, open_regular
from rollfeed.engine.backends.replacement import read_tensors
from rollfeed.engine.checkpoint import check_checkpoint
from rollfeed.errors import CheckpointError, EngineProtocolError
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.weights import WeightDirectory
from rollfeed.weights.checkpoints import check_complete
from rollfeed.weights.transports.delta import CheckpointStore


def _socket(path: Path) -> None:
    os.chdir(path.parent)  # their paths may only be short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "loop": lambda path: path.symlink_to(path.name),
    "link to a pipe": lambda path: (os.mkfifo(path.with_suffix(".pipe")), path.symlink_to(path.with_suffix(".pipe"))),
    "folder": os.mkdir,
}
NAMES = ("model.safetensors", "model.safetensors.index.json", "config.json", "probe.json")


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whoever waits for a pipe is interrupted."""

    def interrupt(*_: object) -> None:
        raise AssertionError("it waits")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*NAMES, "model-00001-of-00001.safetensors"])
def test_x06_what_is_no_file_is_refused_where_folders_are_watched(
    tiny_checkpoint: Path, tmp_path: Path, name: str, kind: str
) -> None:
    folder = tmp_path / "versions" / "version-7"
    shutil.copytree(tiny_checkpoint, folder)
    if "model" in name and name != "model.safetensors":
        (folder / "model.safetensors").unlink()
    if name.startswith("model-"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    if (name, kind) == ("probe.json", "loop"):
        return  # as good as not there: nothing is proved
    with pytest.raises(CheckpointError):
        check_complete(folder)
    assert WeightDirectory(folder.parent, poll_seconds=1.0).newest() is None
    if name != "probe.json":
        with pytest.raises(CheckpointError):
            check_checkpoint(str(folder))
    if "model" in name:
        with pytest.raises(EngineProtocolError, match="weights cannot be read from"):
            read_tensors(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json"])
def test_x06_what_is_no_file_is_refused_where_a_tokenizer_is_loaded(
    tiny_checkpoint: Path, tmp_path: Path, name: str, kind: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(folder)


@pytest.mark.parametrize("entry", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..", "x.bin", 7])
def test_x06_an_index_names_files_beside_it_only(tiny_checkpoint: Path, tmp_path: Path, entry: Any) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    told = f'"{entry}"' if isinstance(entry, str) else entry
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"model.norm.weight": {told}}}}}')
    with pytest.raises(CheckpointError, match="which is not beside it or no"):
        check_complete(folder)
    with pytest.raises(EngineProtocolError, match="which is not beside it or no"):
        read_tensors(folder)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_x06_what_is_no_file_is_no_delta(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "delta")
    store = CheckpointStore(tmp_path / "store")
    with pytest.raises(NotRegularError, match="no regular file"):
        store.receive(tmp_path / "delta")
    store.close()


def test_x06_a_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"x"
