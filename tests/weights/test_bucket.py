"""Checkpoints in an object store: fsspec's own, in memory, and one of files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.weights import WeightBucket

Store = fsspec.AbstractFileSystem
CheckpointMaker = Callable[..., Path]


@pytest.fixture
def store() -> Iterator[Store]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def put(files: Store, folder: Path, name: str, *, but: str = "") -> None:
    for path in folder.iterdir():
        if path.name != but:
            files.pipe_file(f"/run/{name}/{path.name}", path.read_bytes())


def test_the_newest_whole_checkpoint_is_fetched(store: Store, make_checkpoint: CheckpointMaker) -> None:
    bucket = WeightBucket("memory://run", poll_seconds=0.01)
    assert bucket.newest() is None
    made = make_checkpoint("version-000002", shards=2)
    put(store, made, "version-000001")
    put(store, made, "step_10")
    store.pipe_file("/run/step_10/optimizer.bin", b"large")
    store.pipe_file("/run/latest/model.safetensors", b"")
    found = bucket.newest()
    assert found is not None
    version, folder = found
    assert version == 10
    assert {path.name for path in folder.iterdir()} == {path.name for path in made.iterdir()}
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in made.iterdir())
    assert bucket.newest() == found


def test_a_folder_that_is_half_there_is_fetched_when_it_is_whole(
    store: Store, make_checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = WeightBucket("memory://run", poll_seconds=0.01)
    made = make_checkpoint("version-7", shards=2)
    put(store, made, "version-6")
    put(store, made, "version-7", but="model-00002-of-00002.safetensors")
    with caplog.at_level(logging.WARNING):
        assert [bucket.newest()[0] for _ in range(3)] == [6, 6, 6]  # type: ignore[index]
    told = [each.getMessage() for each in caplog.records]
    assert told == ["memory://run/version-7: not taken as weights: has no model-00002-of-00002.safetensors"]
    store.pipe_file("/run/version-7/model-00002-of-00002.safetensors", b"cut short")
    assert bucket.newest()[0] == 6  # type: ignore[index]
    put(store, made, "version-7")
    assert bucket.newest()[0] == 7  # type: ignore[index]


def test_old_ones_go_here_and_what_is_fetched_goes_with_the_bucket(
    store: Store, make_checkpoint: CheckpointMaker
) -> None:
    bucket, made = WeightBucket("memory://run", poll_seconds=0.01), make_checkpoint("version-1")
    for version in range(1, 6):
        put(store, made, f"version-{version}")
        assert bucket.newest()[0] == version  # type: ignore[index]
    place = bucket.path
    assert sorted(path.name for path in place.glob("version-*")) == ["version-3", "version-4", "version-5"]
    del bucket
    assert not place.exists()


async def test_who_waits_in_vain_is_told_what_the_store_has(store: Store, make_checkpoint: CheckpointMaker) -> None:
    put(store, make_checkpoint("version-1"), "version-1", but="config.json")
    bucket = WeightBucket("memory://run", poll_seconds=0.01)
    with pytest.raises(RunFailedError, match=r"memory://run is fetched to .*version-1: has no config.json"):
        await bucket.wait_for(1, timeout_seconds=0.05)


async def test_a_store_that_cannot_be_read_is_told_of(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = WeightBucket("memory://run", poll_seconds=0.01)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(type(store), "ls", fail)
    with pytest.raises(RunFailedError, match="the store: cannot be read: PermissionError: no key"):
        await bucket.wait_for(1, timeout_seconds=0.05)


def test_a_url_of_files_is_one_too(tmp_path: Path, make_checkpoint: CheckpointMaker) -> None:
    make_checkpoint("version-3")
    assert WeightBucket(tmp_path.as_uri(), poll_seconds=0.01).newest()[0] == 3  # type: ignore[index]


def test_a_protocol_that_nothing_speaks_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"weights.directory = 'nonesuch://a': Protocol not known"):
        WeightBucket("nonesuch://a", poll_seconds=1.0)


def test_x07_a_jump_of_versions_is_not_fetched(store: Store, make_checkpoint: CheckpointMaker) -> None:
    bucket = WeightBucket("memory://run", poll_seconds=0.01)
    made = make_checkpoint("version-7")
    for name in ("version-999999999999999999", "version-7"):
        put(store, made, name)
    assert bucket.newest() == (7, bucket.path / "version-7")
