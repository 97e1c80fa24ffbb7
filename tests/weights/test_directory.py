from __future__ import annotations

import asyncio
import logging
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.weights import WeightDirectory

CheckpointMaker = Callable[..., Path]


@pytest.fixture
def directory(tmp_path: Path) -> WeightDirectory:
    return WeightDirectory(tmp_path, poll_seconds=0.001)


def test_the_newest_is_the_highest_number_not_the_last_name(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker
) -> None:
    assert directory.newest() is None
    for name in ("version-000009", "step_10", "8"):
        make_checkpoint(name)
    assert directory.newest() == (10, directory.path / "step_10")
    make_checkpoint("version-000011", shards=2)
    assert directory.newest() == (11, directory.path / "version-000011")


def test_a_version_is_not_seen_before_it_has_its_final_name(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker
) -> None:
    whole = make_checkpoint("1")
    for name in (".2", "2.tmp", ".version-3"):
        shutil.copytree(whole, directory.path / name)
    assert directory.newest() == (1, whole)
    (directory.path / "2.tmp").rename(directory.path / "2")
    assert directory.newest() == (2, directory.path / "2")


def test_an_incomplete_newer_version_leaves_the_last_whole_one(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker
) -> None:
    whole, broken = make_checkpoint("1"), make_checkpoint("2")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-1])
    assert directory.newest() == (1, whole)
    (broken / "model.safetensors").write_bytes(weights)
    assert directory.newest() == (2, broken)


def test_what_is_ignored_is_told_of_once(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "rollfeed")
    make_checkpoint("version-1")
    make_checkpoint("step_1")
    (directory.path / "2").mkdir()
    (directory.path / "3.tmp").mkdir()
    (directory.path / "logs").mkdir()
    (directory.path / "latest_step_4").write_text("4")
    (directory.path / "5").symlink_to(directory.path / "nowhere")
    for _ in range(3):
        assert directory.newest() == (1, directory.path / "step_1")
    told = {Path(r.args[0]).name: (r.levelname, r.getMessage()) for r in caplog.records if isinstance(r.args, tuple)}
    assert len(caplog.records) == len(told) == 6
    assert [name for name, (level, _) in told.items() if level != "WARNING"] == ["3.tmp"]
    assert "config.json is missing" in told["2"][1]
    assert "also step_1, which is used" in told["version-1"][1]
    (directory.path / "2").rmdir()
    directory.newest()
    (directory.path / "2").mkdir()
    directory.newest()
    assert sum("config.json is missing" in record.getMessage() for record in caplog.records) == 2


def test_a_folder_that_is_not_there_yet_has_no_version(tmp_path: Path, make_checkpoint: CheckpointMaker) -> None:
    directory = WeightDirectory(tmp_path / "later", poll_seconds=1.0)
    assert directory.newest() is None
    directory.path.mkdir()
    make_checkpoint("3").rename(directory.path / "3")
    assert directory.newest() == (3, directory.path / "3")


def test_a_file_is_refused_as_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"weights\.directory = .*file'.*not a folder"):
        WeightDirectory(tmp_path / "file", poll_seconds=1.0)


def test_a_checkpoint_that_is_removed_is_no_version_any_more(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_checkpoint("1"), make_checkpoint("2")
    assert directory.newest() == (2, second)
    shutil.rmtree(second)
    assert directory.newest() == (1, first)
    assert caplog.records == []


async def test_waiting_ends_when_the_version_is_there(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker
) -> None:
    make_checkpoint("4")
    waiting = asyncio.create_task(directory.wait_for(5, timeout_seconds=60.0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    newest = await asyncio.to_thread(make_checkpoint, "6")
    assert await waiting == (6, newest)
    assert await directory.wait_for(4, timeout_seconds=0.0) == (6, newest)


async def test_waiting_in_vain_says_what_is_there_instead(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker
) -> None:
    make_checkpoint("version-000004")
    (directory.path / "version-000005").mkdir()
    for number in range(6, 10):
        (directory.path / f"{number}.tmp").mkdir()
    with pytest.raises(RunFailedError) as caught:
        await directory.wait_for(5, timeout_seconds=0.0)
    message = str(caught.value)
    assert "weights of version 5 have not come within 0 s" in message
    assert "version 4 (version-000004) as its newest" in message
    assert "2 more" in message
    assert "weights.timeout_seconds" in message
    assert "\n" not in message


async def test_waiting_for_a_folder_that_never_comes_says_so(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path / "never", poll_seconds=0.001)
    with pytest.raises(RunFailedError, match=r"there is no folder .*never: see whether the trainer runs"):
        await directory.wait_for(1, timeout_seconds=0.01)


def test_only_whole_versions_are_seen_while_a_trainer_writes_and_prunes(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker
) -> None:
    """A trainer's thread publishes 60 versions and keeps two, removing others in any order of their files."""
    random_order = random.Random(7)
    make_checkpoint("0", shards=3)
    done = threading.Event()

    def train() -> None:
        try:
            for version in range(1, 60):
                make_checkpoint(f"{version}", shards=3)
                old = directory.path / f"{version - 2}"
                if version >= 2:
                    files = sorted(old.iterdir())
                    random_order.shuffle(files)
                    for file in files:
                        file.unlink()
                    old.rmdir()
        finally:
            done.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    seen = [0]
    while not done.is_set():
        newest = directory.newest()
        # A look that listed the folder before two more versions came may find nothing of it left.
        if newest is not None:
            seen.append(newest[0])
    trainer.join()
    assert seen == sorted(seen)
    assert directory.newest() == (59, directory.path / "59")


@pytest.mark.parametrize("name", ["version-999999999999999999", "version-1100000", "step-2147483648", "20261130"])
def test_x07_a_jump_of_versions_does_not_hide_those_that_come(
    directory: WeightDirectory, make_checkpoint: CheckpointMaker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(name)
    assert directory.newest() is None
    for version in (1, 2):
        folder = make_checkpoint(f"version-{version}")
        assert directory.newest() == (version, folder)
    (told,) = caplog.messages
    assert f"{name}: not taken as weights: version " in told
    assert "is more than 1000000 above version 0: number folders by the batches" in told


def test_x07_a_long_run_reaches_any_version(directory: WeightDirectory, make_checkpoint: CheckpointMaker) -> None:
    for version in (1_000_000, 1_999_999, 2_900_000):
        folder = make_checkpoint(str(version))
        assert directory.newest() == (version, folder)


def test_a_version_that_is_refused_is_found_again_a_few_times_and_then_no_more(
    tmp_path: Path, make_checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    directory = WeightDirectory(tmp_path, poll_seconds=0.001, again_seconds=(0.0, 3600.0))
    older, newer = make_checkpoint("1"), make_checkpoint("2")
    assert directory.newest() == (2, newer)
    directory.refuse(newer, "not now")
    assert directory.newest() == (2, newer)
    for _ in range(3):  # as two may who have found it at once
        directory.refuse(newer, "not now either")
        assert directory.newest() == (1, older)
    assert [message.partition(": ")[2] for message in caplog.messages] == ["not taken as weights: not now either"]
    (newer / "more.txt").write_text("")
    assert directory.newest() == (2, newer)
