"""Grade right programs beside hostile neighbours, and count the verdicts that are not right.

Run it with::

    python bench/hardening_sandbox.py --out bench/hardening_sandbox.json

Each right program takes a share of its time limit that ought to do. Meanwhile four neighbours are started again and
again in sandboxes of the same provider: one spins with 30 children, one takes memory, one fills its disk, and one makes
processes and empty files. A verdict that depends on them is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rollfeed.benchmarks.machine import machine
from rollfeed.protocols import ExecLimits
from rollfeed.rewards.code.grader import CodeGrader
from rollfeed.sandbox import start_sandboxes

RIGHT = """
import time
number = int(input())
count = 0
while time.process_time() < {seconds}:
    count += 1
print(number * number)
"""
NEIGHBOURS = {
    "spinning": "import os\nfor _ in range(30):\n    if os.fork() == 0: break\nwhile True: pass",
    "memory": "held = []\nwhile True:\n    try: held.append(bytearray(b'x') * (8 << 20))\n    except MemoryError: pass",
    "disk": "n = 0\nwhile True:\n    n += 1\n    try: open(f'/tmp/{n}', 'wb').write(bytes(1 << 22))\n"
    "    except OSError: n = 0",
    "processes": "import os\nn = 0\nwhile True:\n    n += 1\n    try:\n        open(f'f{n}', 'w').close()\n"
    "        if os.fork() == 0: pass\n    except OSError: n = 0",
}


def main() -> None:
    """Grade, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200, help="right ones")
    parser.add_argument("--cpu-seconds", type=float, default=1.25, help="that each takes")
    parser.add_argument("--limit-seconds", type=float, default=6.0)
    parser.add_argument("--at-once", type=int, default=2, help="right programs")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments))
    print(json.dumps(figures, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how often each verdict came, of the right programs and of each neighbour."""
    sandboxes = await start_sandboxes(max_running=arguments.at_once + len(NEIGHBOURS))
    limits = ExecLimits(wall_seconds=arguments.limit_seconds)
    grader = CodeGrader(sandboxes=sandboxes, limits=limits)
    turns = asyncio.Semaphore(arguments.at_once)

    faults, ungraded = list[str](), Counter[str]()

    async def grade(program: str, number: int) -> str:
        label = {"inputs": [str(number)], "outputs": [str(number * number)]}
        verdict = await grader(f"```python\n{program}\n```", label, {})
        if verdict.reward != 1.0 and "process_time" in program:
            faults.append(verdict.detail)
        if verdict.reward is None:
            ungraded[verdict.detail] += 1
        return "ungraded" if verdict.reward is None else "right" if verdict.reward == 1.0 else "wrong"

    async def grade_right(number: int) -> str:
        async with turns:
            return await grade(RIGHT.format(seconds=arguments.cpu_seconds), number)

    async def go_on(name: str, verdicts: Counter[str]) -> None:
        while True:
            verdicts[await grade(NEIGHBOURS[name], 1)] += 1

    started, neighbours = time.monotonic(), {name: Counter[str]() for name in NEIGHBOURS}
    hostile = [asyncio.create_task(go_on(name, verdicts)) for name, verdicts in neighbours.items()]
    right = Counter(await asyncio.gather(*(grade_right(number) for number in range(arguments.programs))))
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    return {
        "right_programs": dict(right),
        "faults": faults,
        "ungraded": dict(ungraded),
        "goal": {"right": arguments.programs, "met": right["right"] == arguments.programs},
        "neighbours": {name: dict(verdicts) for name, verdicts in neighbours.items()},
        "cpu_seconds_each": arguments.cpu_seconds,
        "limit_seconds": arguments.limit_seconds,
        "seconds": time.monotonic() - started,
        "isolation": str(sandboxes.isolation),
        "command": f"python bench/hardening_sandbox.py --programs {arguments.programs} --cpu-seconds "
        f"{arguments.cpu_seconds} --limit-seconds {arguments.limit_seconds} --at-once {arguments.at_once}",
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
