"""Answers of the kinds that public graders got wrong, with the right verdict; the data are in tests/cases."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app.rewards import RewardServices
from rollfeed.config import RemoteRewardSettings, RewardSettings
from rollfeed.rewards.calls import OwnPace
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.over_http.remote import RemoteGrader
from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Outcome, Verdict

CASES = Path(__file__).parents[1] / "cases" / "reward_cases.jsonl"
ELSEWHERE = ("livecodebench", "remote_rm")

# Grades everything given on standard input under a limit of memory and of time on the processor.
UNDER_LIMITS = """
import asyncio, json, resource, sys
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import BUILTIN_GRADERS
import rollfeed.rewards.equality.numeric

with open("/proc/self/statm") as statm:
    present = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (present + 256 * 1024**2,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

async def main():
    hub = RewardHub(graders=BUILTIN_GRADERS, timeout_seconds=5.0, worker_timeout_seconds=600.0)
    for case in json.load(sys.stdin):
        verdict = await hub.grade(case["response"], case["label"], rm_type=case["rm_type"])
        print(json.dumps([case["id"], verdict.reward]))

asyncio.run(main())
"""


def read_cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


def patience(case: dict[str, Any]) -> float:
    """Return in how many seconds a case is done on any machine, however busy."""
    return 60.0 + 20.0 * case["max_seconds"]


def parameter(case: dict[str, Any]) -> Any:
    return pytest.param(case, id=case["id"], marks=pytest.mark.timeout(patience(case)))


def assert_expected(verdict: Verdict, expected: Any) -> None:
    assert verdict.outcome is Outcome.OK, verdict.detail
    assert isinstance(verdict.reward, float)
    if isinstance(expected, dict):
        assert expected["min"] <= verdict.reward <= expected["max"]
    else:
        assert verdict.reward == expected


def assert_absent(path: str | None) -> None:
    assert path is None or not Path(path).exists()


@pytest.mark.parametrize("case", [parameter(case) for case in read_cases() if case["rm_type"] not in ELSEWHERE])
async def test_case_gets_its_verdict(case: dict[str, Any]) -> None:
    hub = RewardHub(graders=BUILTIN_GRADERS, timeout_seconds=1.0, worker_timeout_seconds=patience(case))
    verdict = await hub.grade(
        case["response"], case["label"], rm_type=case["rm_type"], metadata=case.get("metadata", {})
    )
    assert_expected(verdict, case["expected"])
    json.dumps(verdict.extracted).encode()
    assert_absent(case.get("forbid_path"))


@pytest.mark.parametrize("case", [parameter(case) for case in read_cases() if case.get("context") == "thread"])
def test_case_called_from_a_thread_gets_its_verdict(case: dict[str, Any]) -> None:
    verdicts: list[Verdict] = []
    grader = BUILTIN_GRADERS[case["rm_type"]]
    thread = threading.Thread(target=lambda: verdicts.append(grader(case["response"], case["label"], {})))
    thread.start()
    thread.join()
    assert_expected(verdicts[0], case["expected"])


@pytest.mark.parametrize("case", [parameter(case) for case in read_cases() if case.get("context") == "asyncio_thread"])
async def test_case_called_through_to_thread_gets_its_verdict(case: dict[str, Any]) -> None:
    grader = BUILTIN_GRADERS[case["rm_type"]]
    assert_expected(await asyncio.to_thread(grader, case["response"], case["label"], {}), case["expected"])


def test_cases_that_strain_get_their_verdicts_in_little_memory() -> None:
    cases = [case for case in read_cases() if "stress" in case and case["rm_type"] not in ELSEWHERE]
    assert len(cases) >= 7
    done = subprocess.run(
        [sys.executable, "-c", UNDER_LIMITS], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    graded = [json.loads(line) for line in done.stdout.splitlines()]
    assert graded == [[case["id"], case["expected"]] for case in cases]


@pytest.fixture
async def services() -> AsyncIterator[RewardServices]:
    made = RewardServices(RewardSettings(), rm_types=[])
    async with made:
        yield made


@pytest.mark.parametrize("case", [parameter(case) for case in read_cases() if case["rm_type"] == "livecodebench"])
async def test_program_gets_its_verdict(
    case: dict[str, Any], leaves_no_process: None, services: RewardServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in case.get("env", {}).items():
        monkeypatch.setenv(name, value)
    hub = RewardHub(graders=services.graders(), timeout_seconds=1.0, workers=services.workers)
    verdict = await hub.grade(case["response"], case["label"], rm_type="livecodebench")
    assert_expected(verdict, case["expected"])
    assert_absent(case.get("forbid_path"))


@pytest.mark.parametrize("case", [parameter(case) for case in read_cases() if case["rm_type"] == "remote_rm"])
async def test_server_gets_the_reward_through(
    case: dict[str, Any], serve_script: Callable[..., AbstractAsyncContextManager[Any]]
) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_script(case["server"]))
        settings = RemoteRewardSettings(url=server.url, timeout_seconds=60.0)
        grader = await stack.enter_async_context(RemoteGrader(settings))
        hub = RewardHub(graders={"remote_rm": OwnPace(grader)}, timeout_seconds=1.0)

        async def grade() -> Verdict:
            return await hub.grade(
                case["response"], case["label"], rm_type="remote_rm", reward_key=case["reward_key"], prompt="p"
            )

        verdict = await grade()
        assert grader._server.num_in_flight == 0
        if case.get("check") == "no leaked in-flight slot":
            assert verdict.outcome is Outcome.ERROR
            verdict = await grade()
            assert grader._server.num_in_flight == 0
        if isinstance(case["expected"], dict):
            assert case["expected"] == {"error": True}
            assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
            assert "HTTP 500" in verdict.detail
        else:
            assert_expected(verdict, case["expected"])
        assert server.bodies[0] == {"prompt": "p", "response": case["response"], "label": case["label"]}
        assert len(server.bodies) == {"S168": 3, "S169": 3, "S170": 1, "S171": 4}[case["id"]]


def test_no_case_is_left_out_unnoticed() -> None:
    cases = read_cases()
    assert len(cases) == 192
    assert {case["rm_type"] for case in cases} - set(BUILTIN_GRADERS) == {*ELSEWHERE, "boxed_f1", "boxed_gpqa"}
