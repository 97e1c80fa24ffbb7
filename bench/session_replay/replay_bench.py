"""The same conversations under each choice of servers, at several sizes of the servers' memories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from .server_choices import POLICIES
from .session_traces import SessionsWorkload, SessionTrace, make_sessions, turns_by_rank
from .virtual_fleet import replay

OURS, REFERENCE = "ours", "consistent_hashing"


def bench_replay(
    workload: SessionsWorkload, *, cache_tokens: Sequence[int], seeds: Sequence[int], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Replay conversations under every policy, and return JSON values.

    Args:
        workload: What is replayed; its size of a server's memory and its seed are replaced by the following.
        cache_tokens: Tokens that a server's memory has room for.
        seeds: Of the conversations; under the first one all policies are measured, under the others ours and
            consistent hashing.
        progress: Called with a line for each replay.
    """
    cells = []
    for seed in seeds:
        sessions = make_sessions(replace(workload, seed=seed))
        names = list(POLICIES) if seed == seeds[0] else [OURS, REFERENCE]
        for tokens in cache_tokens:
            of_cell = replace(workload, seed=seed, kv_budget_tokens=tokens)
            figures = {}
            for name in names:
                figures[name] = replay(sessions, POLICIES[name](), of_cell.fleet_model, workload.num_engines)
                told = f"{figures[name]['wall_seconds']:.0f} s, {figures[name]['hit_rate']:.3f} of the prompts cached"
                progress(f"seed {seed}, {tokens} tokens a server, {name}: {told}")
            ratio = figures[REFERENCE]["wall_seconds"] / figures[OURS]["wall_seconds"]
            cell = {"seed": seed, "cache_tokens": tokens, "wall_ratio": ratio, "policies": figures}
            cells.append(cell | {"most_hit_rate": most_hit_rate(sessions)})
    turns = turns_by_rank(workload)
    return {
        "workload": asdict(workload) | {"mode": workload.mode.value, "turns": [int(turns.max()), int(turns.min())]},
        "worst_hit_rate": min(cell["policies"][OURS]["hit_rate"] for cell in cells),
        "worst_wall_ratio": min(cell["wall_ratio"] for cell in cells),
        "cells": cells,
    }


def most_hit_rate(sessions: Sequence[SessionTrace]) -> float:
    """Return the share of prompts that is cached where a group computes its prompt once, and nothing else twice."""
    num_prompt = num_new = 0
    groups = set()
    for session in sessions:
        num_tokens = 0
        for index, turn in enumerate(session.turns):
            num_tokens += len(turn.told)
            num_prompt += num_tokens
            num_tokens += turn.num_sampled
            num_new += len(turn.told) if index or session.group not in groups else 0
        groups.add(session.group)
    return 1.0 - num_new / num_prompt
