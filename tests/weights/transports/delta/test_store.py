"""Folders from deltas: bit for bit, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.weights.transports.delta.folders import FolderMaker, content_of, tensors_of

from rollfeed.errors import ConfigError
from rollfeed.weights.transports.delta import CheckpointStore
from rollfeed.weights.transports.delta.encoding import DamagedError, zipped
from rollfeed.weights.transports.delta.files import _MARK, CheckpointPieces, _file_checksum, read_delta, write_delta
from rollfeed.weights.transports.delta.store import OtherBaseError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with closing(CheckpointStore(tmp_path / "store")) as opened:
        yield opened


def write(path: Path, new: Path, version: int, old: Path | None = None) -> Path:
    before = None if old is None else CheckpointPieces(old)
    sums = {} if before is None else before.sums()
    write_delta(path, CheckpointPieces(new), policy_version=version, old=before, old_sums=sums)
    return path


@pytest.mark.parametrize("files", [1, 2])
def test_folders_come_out_bit_for_bit_in_every_type(
    tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore, files: int
) -> None:
    first = folder_of("first", tensors_of(0), files=files)
    second = folder_of("second", tensors_of(1, step=0.5), files=files, **{"config.json": '{"a": 1}', "more/x.txt": "x"})
    whole = write(tmp_path / "whole", first, 0)
    delta = write(tmp_path / "delta", second, 1, first)
    held = [store.receive(whole), store.receive(delta)]
    assert [content_of(Path(each.folder)) for each in held] == [content_of(first), content_of(second)]
    assert [each.policy_version for each in store.held] == [0, 1]
    assert read_delta(delta).base == held[0].digest
    changed = {key for change in read_delta(delta).changes if (key := change.key)[1]}
    assert 0 < len(changed) < len(tensors_of(0))


def test_nothing_changed_is_next_to_nothing_to_send(
    tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore
) -> None:
    first, same = folder_of("first", tensors_of(0)), folder_of("same", tensors_of(0))
    store.receive(write(tmp_path / "whole", first, 4))
    delta = write(tmp_path / "delta", same, 5, first)
    assert read_delta(delta).changes == []
    assert delta.stat().st_size < 500
    held = store.receive(delta)
    assert held.policy_version == 5
    assert content_of(Path(held.folder)) == content_of(first)


def test_files_that_come_go_or_change_shape_are_sent_whole(
    tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore
) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(3)}
    first = folder_of("first", tensors, **{"gone.txt": "gone"})
    second = folder_of("second", {**tensors, "b": torch.ones(3, 1), "c": torch.ones(1)}, **{"come.txt": "come"})
    store.receive(write(tmp_path / "whole", first, 0))
    held = store.receive(write(tmp_path / "delta", second, 1, first))
    assert content_of(Path(held.folder)) == content_of(second)


def test_200_updates_in_a_row_lose_nothing(tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 96, generator=generator) * 0.05
    before = folder_of("version-0", {"w": weight.bfloat16(), "b": weight[0].clone()})
    held = store.receive(write(tmp_path / "whole", before, 0))
    for version in range(1, 201):
        weight += torch.randn(64, 96, generator=generator) * 10 ** (-3 - 4 * (version % 7) / 7)
        after = folder_of(f"version-{version}", {"w": weight.bfloat16(), "b": weight[0].clone()})
        held = store.receive(write(tmp_path / "delta", after, version, before))
        assert content_of(Path(held.folder)) == content_of(after)
        before = after
    assert [each.policy_version for each in store.held] == [199, 200]
    assert len(list((tmp_path / "store").glob("version-*"))) == 4  # two folders, and their checksums


def test_a_delta_of_other_weights_is_refused_and_the_older_versions_stay(
    tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore
) -> None:
    one, other = folder_of("one", tensors_of(1, step=0.5)), folder_of("other", tensors_of(2, step=0.5))
    held = store.receive(write(tmp_path / "whole", one, 3))
    delta = write(tmp_path / "delta", folder_of("next", tensors_of(3, step=0.5)), 4, other)
    with pytest.raises(OtherBaseError, match=f"version 4 changes .* here are 3 \\({held.digest[:8]}\\): send all"):
        store.receive(delta)
    assert store.held == [held]


def test_no_damaged_byte_gets_through(tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore) -> None:
    first, second = folder_of("first", tensors_of(0)), folder_of("second", tensors_of(1, step=0.5))
    held = store.receive(write(tmp_path / "whole", first, 0))
    delta = write(tmp_path / "delta", second, 1, first)
    content = delta.read_bytes()
    random = np.random.default_rng(2)
    for at in [0, 7, 8, len(content) - 40, len(content) - 1, *random.integers(0, len(content), 30)]:
        delta.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(DamagedError):
            store.receive(delta)
    for length in (0, 10, len(content) // 2, len(content) - 1):
        delta.write_bytes(content[:length])
        with pytest.raises(DamagedError):
            store.receive(delta)
    assert store.held == [held]
    assert not list((tmp_path / "store").glob(".version-*"))


def test_a_base_that_somebody_has_changed_is_found_out(
    tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore
) -> None:
    first, second = folder_of("first", tensors_of(0)), folder_of("second", tensors_of(1, step=0.5))
    held = store.receive(write(tmp_path / "whole", first, 0))
    path = Path(held.folder) / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(DamagedError, match="is not what was published"):
        store.receive(write(tmp_path / "delta", second, 1, first))


def test_a_file_outside_its_folder_is_refused(tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore) -> None:
    pieces = CheckpointPieces(folder_of("first", {"a": torch.ones(2)}, **{"evil.txt": "x"}))
    for names in (pieces.sizes, pieces.spans):
        for key in [each for each in names if "evil.txt" in each]:
            names["../evil.txt" if isinstance(key, str) else ("../evil.txt", "")] = names.pop(key)
    (tmp_path / "evil.txt").write_text("x")
    write_delta(tmp_path / "whole", pieces, policy_version=0, old_sums={})
    with pytest.raises(DamagedError, match="not inside its folder"):
        store.receive(tmp_path / "whole")


def test_tables_and_headers_that_are_nested_without_end_are_damaged(
    tmp_path: Path, folder_of: FolderMaker, store: CheckpointStore
) -> None:
    told = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90"
    delta, packed = tmp_path / "delta", zipped(told)
    delta.write_bytes(_MARK + packed + len(told).to_bytes(8, "little") + len(packed).to_bytes(8, "little"))
    with delta.open("rb+") as file:
        file.write(_file_checksum(file, delta.stat().st_size))
    with pytest.raises(DamagedError, match="its table is of another form"):
        store.receive(delta)
    folder, header = folder_of("first", {"a": torch.ones(2)}), b"[" * 100_000
    (folder / "model-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedError, match="its header is not that of a safetensors file"):
        CheckpointPieces(folder)


def test_a_restart_finds_what_is_whole_and_removes_the_rest(tmp_path: Path, folder_of: FolderMaker) -> None:
    root, store = tmp_path / "store", CheckpointStore(tmp_path / "store")
    first, second = folder_of("first", tensors_of(0)), folder_of("second", tensors_of(1, step=0.5))
    held = [store.receive(write(tmp_path / "whole", first, 0))]
    held.append(store.receive(write(tmp_path / "delta", second, 1, first)))
    store.close()
    (root / ".version-000002-abc.tmp").mkdir()
    (root / ".incoming-5").write_bytes(b"half")
    store = CheckpointStore(root)
    assert store.held == held
    assert not list(root.glob(".version*")) + list(root.glob(".incoming*"))
    store.close()
    path = Path(held[1].folder) / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    nested = root / "version-000009-abc"
    nested.mkdir()
    nested.with_suffix(".checksums").write_bytes(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90")
    store = CheckpointStore(root)
    assert store.held == held[:1]
    assert not nested.exists()
    assert not Path(held[1].folder).exists()
    store.receive(tmp_path / "delta")
    assert content_of(Path(held[1].folder)) == content_of(second)
    store.close()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    holder = f"from rollfeed.weights.transports.delta import CheckpointStore; from pathlib import Path; import time\n\
s = CheckpointStore(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match="another process receives weights there"):
            CheckpointStore(tmp_path)
        process.kill()
    CheckpointStore(tmp_path).close()
