from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollfeed.report import Curves, curves_of, warn_without_drawing, write_curves


def test_both_files_are_written_anew_each_time(tmp_path: Path, learning: Curves) -> None:
    write_curves(tmp_path, curves_of(evaluations=[]), settings={})
    before = (tmp_path / "curve.html").read_text(), (tmp_path / "curve.png").read_bytes()
    write_curves(tmp_path, learning, settings={})
    after = (tmp_path / "curve.html").read_text(), (tmp_path / "curve.png").read_bytes()
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert after[0].startswith("<!DOCTYPE html>")
    assert after[1].startswith(b"\x89PNG\r\n")
    assert tmp_path.name in after[0]


def test_without_matplotlib_the_picture_is_left_out_with_a_warning(
    tmp_path: Path, learning: Curves, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_without_drawing()
    assert not caplog.records
    monkeypatch.delitem(sys.modules, "rollfeed.report.picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    warn_without_drawing()
    assert "curve.png is left out, as matplotlib cannot be used" in caplog.text
    assert "pip install 'rollfeed[train]'" in caplog.text
    write_curves(tmp_path, learning, settings={})
    assert [path.name for path in tmp_path.iterdir()] == ["curve.html"]
