from __future__ import annotations

from pathlib import Path

import pytest

from rollfeed.app.sources import find_file


def test_a_data_file_is_found_in_the_home_folder_and_by_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", str(tmp_path))
    for path in ("~/a.jsonl", "$DATA/a.jsonl", "${DATA}/a.jsonl"):
        assert find_file(path, [Path("/nowhere")]) == tmp_path / "a.jsonl"
        assert find_file(f"{path}@[0:3]", []) == tmp_path / "a.jsonl@[0:3]"
