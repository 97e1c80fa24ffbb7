"""``rollfeed bench agents``: what turns and tools cost.

A turn costs CPU time of this process, beside one of a client that renders the whole conversation again. A tool costs
slots that nobody uses: measured as in :mod:`rollfeed.benchmarks.schedule`, with the same bound, all slots full all the
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollfeed.benchmarks.agents.tools import AgentsWorkload, mean_wait_seconds
from rollfeed.benchmarks.agents.turns import TurnsWorkload, bench_turns
from rollfeed.benchmarks.schedule import bench_schedule
from rollfeed.protocols import Tokenizer

__all__ = ["AgentsWorkload", "TurnsWorkload", "bench_agents", "bench_turns", "mean_wait_seconds"]

GOALS = {"turn_seconds_last_over_first": 1.1, "efficiency": 0.95}


def bench_agents(
    turns: TurnsWorkload, agents: AgentsWorkload, tokenizer: Tokenizer, *, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure turns, then the scheduler with tools where that has steps; return JSON values.

    Raises:
        ConfigError: If the tokenizer has no chat template, or that refuses a conversation.
        RollfeedError: If the run fails.
    """
    result: dict[str, Any] = {
        "cpu": bench_turns(turns, tokenizer, progress=progress),
        "seed": agents.seed,
        "goals": GOALS,
    }
    if agents.num_steps:
        result["schedule"] = bench_schedule(agents, progress=progress)
        del result["schedule"]["versions"]["spanning_share"]  # to its count, every turn but the first is resumed
        result["mean_wait_seconds"] = mean_wait_seconds(agents)
    return result
