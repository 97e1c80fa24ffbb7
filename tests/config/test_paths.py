from __future__ import annotations

import pytest

from rollfeed.config.paths import expand_path


def test_home_and_environment_variables_are_replaced_and_unset_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("NOTHING", raising=False)
    assert expand_path("~/a.jsonl@[0:3]") == "/home/someone/a.jsonl@[0:3]"
    assert expand_path("$DATA/${DATA}/~/$NOTHING") == "/data//data/~/$NOTHING"
