from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

from rollfeed.base.atomic import replace_file, replace_folder


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    replace_file(path, lambda file: file.write(b"after"))
    assert path.read_text() == "after"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_whose_writing_fails_stays_as_it_was(tmp_path: Path) -> None:
    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError("disk full")

    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "new").write_text("after")

    (tmp_path / ".folder.tmp").mkdir()
    (tmp_path / ".folder.tmp" / "left by a killed process").write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("before")
    replace_folder(folder, fill)
    assert [path.name for path in folder.iterdir()] == ["inner"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_whose_filling_fails_stays_as_it_was(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("before")
    with pytest.raises(OSError, match="disk full"):
        replace_folder(folder, fail)
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
