from __future__ import annotations

import os

from rollfeed.engine.cores import num_physical_cores


def test_there_is_at_least_one_core_and_no_more_than_this_process_may_use() -> None:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= num_physical_cores() <= (allowed or 1)
