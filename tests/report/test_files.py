from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from rollfeed.errors import ConfigError
from rollfeed.report import CurveFiles, Curves, curves_of, require_drawing


def put(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    with path.open("wb") as file:
        write(file)


def test_both_files_are_written_anew_each_time(tmp_path: Path, learning: Curves) -> None:
    shown = [curves_of(evaluations=[]), learning]
    files = CurveFiles(tmp_path, settings={}, read=lambda: shown.pop(0), replace_file=put)
    files.write()
    before = (tmp_path / "curve.html").read_text(), (tmp_path / "curve.png").read_bytes()
    files.write()
    after = (tmp_path / "curve.html").read_text(), (tmp_path / "curve.png").read_bytes()
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert after[0].startswith("<!DOCTYPE html>")
    assert after[1].startswith(b"\x89PNG\r\n")
    assert tmp_path.name in after[0]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_drawing()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollfeed\[train\]'"):
        require_drawing()
