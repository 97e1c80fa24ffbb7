from __future__ import annotations

import os

import pytest

from rollfeed.base.cores import num_physical_cores, wait_without_spinning


def test_there_is_at_least_one_core_and_no_more_than_this_process_may_use() -> None:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= num_physical_cores() <= (allowed or 1)


def test_the_way_threads_wait_is_left_to_a_user_who_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    wait_without_spinning()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    wait_without_spinning()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
