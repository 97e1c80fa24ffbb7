"""Groups of one that publishes and a server, several of which are made at a time."""

from __future__ import annotations

import os

import pytest

from rollfeed.base.update_group import _FAILING, _FAILING_SOFTLY


@pytest.mark.parametrize("before", [None, "0"])
def test_groups_that_are_made_at_a_time_all_fail_softly_and_leave_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_NCCL_BLOCKING_WAIT"
    for each in _FAILING:
        monkeypatch.delenv(each, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    for _ in range(2):
        with _FAILING_SOFTLY:
            _FAILING_SOFTLY.__enter__()
        assert os.environ[name] == "1"  # the second one is still being made
        _FAILING_SOFTLY.__exit__(None, None, None)
        assert os.environ.get(name) == before
