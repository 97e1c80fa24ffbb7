"""Variants of the cases in ``test_cases``, dozens a kind of answer; the data are in tests/cases."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Outcome, Verdict

CASES = Path(__file__).parents[1] / "cases" / "more_reward_cases.jsonl"


def read_cases() -> dict[str, list[dict[str, Any]]]:
    """Return the cases by kind and ``rm_type``."""
    cases = defaultdict(list)
    for line in CASES.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        cases[f"{case['kind']}: {case['rm_type']}"].append(case)
    return cases


def is_expected(verdict: Verdict, expected: Any) -> bool:
    if expected == {"error": True}:
        return verdict.outcome is Outcome.ERROR and verdict.reward is None and bool(verdict.detail)
    return verdict.outcome is Outcome.OK and verdict.reward == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", sorted(read_cases()))
async def test_variants_get_their_verdicts(kind: str) -> None:
    hub = RewardHub(graders=BUILTIN_GRADERS, timeout_seconds=5.0, worker_timeout_seconds=60.0)
    failed = []
    for case in read_cases()[kind]:
        verdict = await hub.grade(
            case["response"], case["label"], rm_type=case["rm_type"], metadata=case.get("metadata")
        )
        json.dumps(verdict.extracted).encode()
        if not is_expected(verdict, case["expected"]):
            failed.append((case["id"], case["response"][-80:], case["label"], case["expected"], verdict))
    assert not failed


def test_every_kind_has_variants() -> None:
    by_kind = read_cases()
    ids = [case["id"] for cases in by_kind.values() for case in cases]
    assert len(set(ids)) == len(ids) > 1_800
    graded = {case["rm_type"] for cases in by_kind.values() for case in cases}
    assert graded >= set(BUILTIN_GRADERS) - {"random", "exact", "number"}
