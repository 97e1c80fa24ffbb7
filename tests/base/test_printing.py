"""What users print in this process goes to a file, whoever else prints."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from rollfeed.base.printing import keeping_prints, users_printing


def say(*words: str, end: str = "\n") -> None:
    with users_printing():
        print(*words, end=end)


def test_lines_of_threads_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "printed"
    with keeping_prints(path):
        say("one", "two", end=" ")
        other = threading.Thread(target=say, args=("other",))
        other.start()
        other.join()
        say("three")
        say("no end", end="")
    assert path.read_text() == "other\none two three\nno end\n"


def test_a_block_within_another_one_leaves_the_file_to_it(tmp_path: Path) -> None:
    path = tmp_path / "printed"
    with keeping_prints(path):
        path.touch()  # as a pool of workers does that has started
        with keeping_prints(path):
            pass
        assert path.exists()
        say("later")
    assert path.read_text() == "later\n"


def test_a_file_that_stays_empty_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "printed"
    with keeping_prints(path):
        path.touch()
    assert not path.exists()


def test_a_print_within_a_print_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "printed"
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back where the thread hangs

    def work() -> None:
        with keeping_prints(path):
            write = sys.stdout._put  # type: ignore[attr-defined]

            def put(text: str) -> None:  # as where a finalizer prints
                monkeypatch.setattr(sys.stdout, "_put", write)
                say("finalizer")
                write(text)

            monkeypatch.setattr(sys.stdout, "_put", put)
            say("printed")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert path.read_text() == "finalizer\nprinted\n"
