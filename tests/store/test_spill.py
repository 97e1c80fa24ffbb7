from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.store.spill import SpillFile
from rollfeed.types import Group


@pytest.fixture
def make_draw(make_group):
    def make(group_index: int) -> Group:
        group = make_group(group_index, [1.0, 0.0])
        return Group(group_index, group.prompt, group.rollouts)

    return make


def test_draws_come_back_in_any_order_with_what_they_had(tmp_path: Path, make_draw, plain) -> None:
    spill = SpillFile(tmp_path / "spill")
    handles = [spill.put(make_draw(index)) for index in range(5)]
    for index in (3, 0, 4, 1, 2):
        assert plain(spill.take(handles[index])) == plain(make_draw(index))
    assert len(spill) == 0


def test_the_disk_holds_what_waits_and_no_more(tmp_path: Path, make_draw) -> None:
    spill = SpillFile(tmp_path)
    waiting = [spill.put(make_draw(index)) for index in range(4)]
    for index in range(4, 40):
        spill.take(waiting.pop(0))
        waiting.append(spill.put(make_draw(index)))
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"draw-{number}.spill" for number in waiting)
    assert len(spill) == 4
    spill.close()
    spill.close()
    assert not tmp_path.exists()


def test_a_peek_leaves_the_draw_and_a_take_does_not(tmp_path: Path, make_draw, plain) -> None:
    spill = SpillFile(tmp_path)
    handle = spill.put(make_draw(1))
    assert plain(spill.peek(handle)) == plain(spill.take(handle))
    with pytest.raises(KeyError):
        spill.take(handle)


def test_draws_are_read_by_one_thread_while_another_takes_them(tmp_path: Path, make_draw) -> None:
    spill = SpillFile(tmp_path)
    handles = [spill.put(make_draw(index)) for index in range(50)]

    def read(handle: int) -> int | None:
        try:
            return spill.peek(handle).group_index
        except KeyError:
            return None

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read, handle) for handle in handles]
        taking = [pool.submit(spill.take, handle) for handle in reversed(handles)]
        assert all(read.result() in (None, index) for index, read in enumerate(reading))
        assert [each.result().group_index for each in taking] == list(reversed(range(50)))
    assert len(spill) == 0


def test_what_a_killed_process_left_is_removed_and_other_files_are_not(tmp_path: Path, make_draw) -> None:
    SpillFile(tmp_path).put(make_draw(1))
    (tmp_path / "notes.txt").write_text("mine")
    SpillFile(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_damaged_draw_is_named(tmp_path: Path, make_draw) -> None:
    spill = SpillFile(tmp_path)
    handle = spill.put(make_draw(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(RunFailedError, match="stored group is damaged"):
        spill.take(handle)


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailedError, match="the buffer cannot be put there: File exists"):
        SpillFile(tmp_path / "file")


def test_a_draw_that_cannot_be_written_does_not_count(tmp_path: Path, make_draw) -> None:
    spill = SpillFile(tmp_path / "spill")
    (tmp_path / "spill").rmdir()
    with pytest.raises(RunFailedError, match="the buffer cannot be put there: No such file or directory"):
        spill.put(make_draw(1))
    assert len(spill) == 0


def test_the_folder_is_gone_at_the_end(tmp_path: Path) -> None:
    SpillFile(tmp_path / "spill").close()
    assert list(tmp_path.iterdir()) == []
