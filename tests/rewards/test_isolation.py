from __future__ import annotations

import subprocess
import sys

import pytest

from rollfeed.errors import WorkerCallError, WorkerTimeoutError
from rollfeed.rewards.isolation import InProcessWorkers, IsolatedCall
from rollfeed.types import Verdict


def test_package_loads_nothing_that_only_workers_need() -> None:
    program = "import rollfeed.rewards.hub, sys; print(sorted({'mpmath', 'sympy', 'math_verify'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_isolated_call_can_be_made_in_this_thread() -> None:
    call = IsolatedCall("math.sqrt", (4,), lambda root: Verdict(reward=root))
    assert call.run_here().reward == 2.0


async def test_in_process_workers_keep_the_deadline() -> None:
    with pytest.raises(WorkerTimeoutError, match=r"time\.sleep: not done within 0\.01 s"):
        await InProcessWorkers().call("time.sleep", [0.2], deadline_seconds=0.01)


async def test_in_process_workers_say_what_was_raised() -> None:
    with pytest.raises(WorkerCallError, match=r"math\.sqrt: ValueError"):
        await InProcessWorkers().call("math.sqrt", [-1], deadline_seconds=5.0)
