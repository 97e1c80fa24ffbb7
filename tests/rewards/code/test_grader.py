from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult, Isolation, IsolationLevel
from rollfeed.rewards.code.grader import CodeGrader
from rollfeed.sandbox import start_sandboxes
from rollfeed.types import Correct, Outcome

CASES_FILE = Path(__file__).parents[2] / "cases" / "reward_cases.jsonl"
CASES = [
    case
    for case in map(json.loads, CASES_FILE.read_text(encoding="utf-8").splitlines())
    if case["rm_type"] == "livecodebench"
]
SUM = json.dumps({"inputs": ["2 3\n"], "outputs": ["5\n"]})


def in_fence(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\n"


def label(inputs: list[Any], outputs: list[Any], function: str | None = None) -> str:
    return json.dumps({"inputs": inputs, "outputs": outputs} | ({"fn_name": function} if function else {}))


def own_children() -> list[str]:
    children = f"/proc/self/task/{os.getpid()}/children"
    return Path(children).read_text().split()


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_the_verdict_of_a_known_case(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in case.get("env", {}).items():
        monkeypatch.setenv(name, value)
    before = own_children()  # of other tests: the server that forks commands
    limits = ExecLimits(wall_seconds=case.get("per_case_seconds", 6.0))
    grader = CodeGrader(sandboxes=await start_sandboxes(), limits=limits)
    started = time.monotonic()
    verdict = await grader(case["response"], case["label"], case.get("metadata", {}))
    seconds = time.monotonic() - started
    assert verdict.outcome is Outcome.OK, verdict.detail
    assert isinstance(verdict.reward, float)
    if isinstance(case["expected"], dict):
        assert case["expected"]["min"] <= verdict.reward <= case["expected"]["max"]
    else:
        assert verdict.reward == case["expected"], verdict.detail
    assert seconds <= case["max_seconds"] * limits.patience  # of which all may pass on a busy machine
    if "forbid_path" in case:
        assert not await asyncio.to_thread(os.path.exists, case["forbid_path"])
    assert set(own_children()) <= set(before)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(List, deque([1]), inf)", label([""], ["typing.List deque([1]) inf"])),
        ("import sys\nprint(sys.stdin.read().upper()); exit()", label(["a b\nc"], ["A B\nC"])),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))", label(["20000"], ["20000"])),
        ("print(input() + '!')\nif __name__ != '__main__': raise ValueError", label(["a"], ["a!"])),
        ("print(10 ** 5000 == int(input()))", label(["1" + "0" * 5000], ["True"])),
        ("class Solution:\n    def f(self, xs: List[int]) -> int: return sum(xs)", label(["[1, 2]"], ["3"], "f")),
        ("def f(a, b): print('noise'); return (a, [b])", label(['"x"\n[1]'], ['["x", [[1]]]'], "f")),
        ("def f(s): return input", label(['"x"'], ["0"], "g")),
        ("def f(x): return x / 3\nif __name__ == '__main__': f(input())", label(["1"], ["0.333333333"], "f")),
        ("def f(xs): return Counter(xs)", label(['["a", "a"]'], ['{"a": 2}'], "f")),
    ],
)
async def test_programs_are_run_as_contest_sites_run_them(program: str, tests: str, grader: CodeGrader) -> None:
    verdict = await grader(in_fence(program), tests, {})
    assert verdict.outcome is Outcome.OK
    assert verdict.reward == (0.0 if '"g"' in tests else 1.0), verdict.detail


@pytest.mark.parametrize(
    ("program", "tests", "said"),
    [
        ("print(6)", SUM, "test 1 of 1: wrong answer '6', expected '5"),
        ("print(5); raise SystemExit(1)", SUM, "exit code 1"),
        ("print(5); 1 / 0", SUM, "ZeroDivisionError"),
        ("print(5", SUM, "SyntaxError"),
        (
            "class E(int):\n    def __eq__(self, o): return True\ndef f(x): return E(1)",
            label(["4"], ["5"], "f"),
            "is a E",
        ),
        ("def f(x): return float('nan')", label(["4"], ["5.0"], "f"), "wrong answer"),
        ("def f(x): return '5'", label(["4"], ["5"], "f"), "wrong answer"),
        ("import os\nos.write(1, b'not json')\ndef f(x): os._exit(0)", label(["4"], ["5"], "f"), "wrong answer"),
        (
            "import builtins, json, sys\njson.dumps = lambda *a, **k: '5'\ndef f(x): return 5",
            label(["4", "4"], ["5", "6"], "f"),
            "test 2 of 2",
        ),
        ("print(5)\nimport os\nos.chmod('.', 0)", label(["", ""], ["5", "6"]), "test 2 of 2: wrong answer"),
        (
            "open('runner.py', 'w').write('print(5)')\nprint(5)",
            label(["", ""], ["5", "6"]),
            "test 2 of 2: wrong answer",
        ),
    ],
)
async def test_a_program_that_fails_earns_nothing_and_is_told_why(
    program: str, tests: str, said: str, grader: CodeGrader
) -> None:
    verdict = await grader(in_fence(program), tests, {})
    assert (verdict.outcome, verdict.reward, verdict.correct) == (Outcome.OK, 0.0, Correct.NO)
    assert said in verdict.detail
    assert verdict.extracted is not None


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "",
        "not json",
        "3",
        3,
        [],
        "{}",
        {"inputs": ["1"]},
        {"inputs": [], "outputs": []},
        {"inputs": ["1", "2"], "outputs": ["1"]},
        {"inputs": "1", "outputs": "1"},
        {"inputs": [None], "outputs": ["1"]},
        {"inputs": ["1"], "outputs": ["1"], "fn_name": "os.system('x')"},
        {"inputs": ["not json"], "outputs": ["1"], "fn_name": "f"},
        {"inputs": ["1"], "outputs": ["not json"], "fn_name": "f"},
        "[" * 100_000,
        [{"input": "1", "output": "1", "testtype": "functional"}],
        [{"input": "1", "output": "1", "testtype": "interactive"}],
        [{"input": "1", "output": "1", "testtype": "stdin"}, {"input": "1", "output": "1", "testtype": "functional"}],
    ],
)
async def test_a_label_without_tests_is_an_error_and_no_reward(wrong: Any, grader: CodeGrader) -> None:
    verdict = await grader(in_fence("print(1)"), wrong, {})
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
    assert verdict.detail


async def test_tests_may_be_a_list_of_input_and_output(grader: CodeGrader) -> None:
    tests = [{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "2"}]
    assert (await grader(in_fence("print(sum(map(int, input().split())))"), tests, {})).reward == 1.0
    calls = [{"input": "[1, 2]", "output": "3", "testtype": "functional"}]
    assert (await grader(in_fence("def f(xs): return sum(xs)"), calls, {"fn_name": "f"})).reward == 1.0
    scripts = [{"input": "3", "output": "3", "testtype": "stdin"}]
    assert (await grader(in_fence("print(input())"), scripts, {"fn_name": "f"})).reward == 1.0


async def test_answer_that_has_to_be_long_is_no_flood(grader: CodeGrader) -> None:
    long = " ".join(map(str, range(200_000)))
    assert len(long) > ExecLimits().max_output_bytes
    assert (await grader(in_fence("print(*range(200000))"), label([""], [long]), {})).reward == 1.0
    numbers = label(["200000"], [list(range(200_000))], "f")
    assert (await grader(in_fence("def f(n): return list(range(n))"), numbers, {})).reward == 1.0
    flood = await grader(in_fence("while True: print('y' * 10000)"), label([""], [long]), {})
    assert (flood.reward, flood.detail) == (0.0, "test 1 of 1: stopped: output limit")


async def test_a_response_that_is_no_text_is_an_error(grader: CodeGrader) -> None:
    verdict = await grader(None, SUM, {})  # type: ignore[arg-type]
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)


async def test_a_program_without_a_complete_block_has_no_format(grader: CodeGrader) -> None:
    verdict = await grader("print(5)", SUM, {})
    assert (verdict.reward, verdict.format_ok, verdict.extracted) == (0.0, False, None)


class BrokenSandboxes:
    isolation = Isolation(level=IsolationLevel.LIMITS, network_cut=False, files_hidden=False, detail="")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        raise SandboxError("no space left")
        yield


async def test_a_sandbox_that_fails_is_an_error_and_no_reward() -> None:
    grader = CodeGrader(sandboxes=BrokenSandboxes(), limits=ExecLimits())
    verdict = await grader(in_fence("print(5)"), SUM, {})
    assert (verdict.outcome, verdict.reward, verdict.detail) == (Outcome.ERROR, None, "no space left")


async def test_expected_outputs_are_not_in_the_sandbox(grader: CodeGrader) -> None:
    program = """
import os, sys
text = input() + " ".join(sys.argv)
for folder, _, names in os.walk("."):
    for name in names:
        text += open(os.path.join(folder, name), errors="replace").read()
for pid in filter(str.isdigit, os.listdir("/proc")):
    text += open(f"/proc/{pid}/cmdline", errors="replace").read()
print("expected-" + "output" if "expected-" + "output" in text else "nothing")
"""
    verdict = await grader(in_fence(program), label(["x"], ["expected-output"]), {})
    assert verdict.reward == 0.0
    assert "wrong answer 'nothing'" in verdict.detail


class BusySandboxes:
    """Sandboxes of a machine that is too busy for the first programs."""

    isolation = Isolation(level=IsolationLevel.BUBBLEWRAP, network_cut=True, files_hidden=True, detail="")

    def __init__(self, num_starved: int) -> None:
        self.num_left, self.num_programs = num_starved, 0
        self.patience: list[float] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[BusySandboxes]:
        yield self

    async def write(self, path: str, content: bytes) -> None: ...

    async def read(self, path: str, *, max_bytes: int = 0) -> bytes:
        raise SandboxError("there is none")

    async def exec(self, command: Sequence[str], *, stdin: bytes = b"", limits: ExecLimits) -> ExecResult:
        self.num_programs += 1
        self.num_left -= 1
        self.patience.append(limits.patience)
        starved = self.num_left >= 0
        outcome, code = (ExecOutcome.STARVED, None) if starved else (ExecOutcome.EXITED, 0)
        return ExecResult(outcome=outcome, exit_code=code, stdout=b"5\n", stderr=b"", wall_seconds=60.0)


@pytest.mark.parametrize(("num_starved", "reward", "num_programs"), [(0, 1.0, 1), (1, 1.0, 2), (2, None, 2)])
async def test_x20_a_program_without_its_share_is_run_again_and_then_ungraded(
    num_starved: int, reward: float | None, num_programs: int
) -> None:
    sandboxes = BusySandboxes(num_starved)
    verdict = await CodeGrader(sandboxes=sandboxes, limits=ExecLimits())(in_fence("print(5)"), SUM, {})
    assert (verdict.reward, sandboxes.num_programs) == (reward, num_programs)
    assert sandboxes.patience == [10.0, 30.0][:num_programs]
    if reward is None:
        assert verdict.outcome is Outcome.ERROR
        assert "too busy" in verdict.detail
