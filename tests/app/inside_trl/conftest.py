"""The stand-in for TRL, and rows of a data set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.inside_trl.trainers import Rows

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, in place of a TRL that there may be."""
    monkeypatch.syspath_prepend(STAND_IN)
    yield
    for name in [name for name in sys.modules if name == "trl" or name.startswith("trl.")]:
        del sys.modules[name]


@pytest.fixture
def chats() -> Rows:
    return Rows([{"prompt": [{"role": "user", "content": f"say {n}"}], "label": str(n)} for n in range(6)])
