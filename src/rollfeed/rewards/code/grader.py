"""The grader of programs: all tests of the problem must pass, run in a sandbox.

Expected outputs never enter the sandbox, so a program can only earn its reward by computing them.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rollfeed.answers import find_code
from rollfeed.errors import RewardError, SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult, SandboxProvider
from rollfeed.rewards.code import runner
from rollfeed.rewards.code.comparison import same_output, same_value
from rollfeed.rewards.code.problem import CodeTest, CodeTests, parse_tests
from rollfeed.types import Outcome, Verdict

_PYTHON = ("", "python", "python3", "py", "py3", "cpython")
MAX_CHARS = 100_000
"""A longer program is none."""
_MAX_EXTRACTED_CHARS = 4_000
_OUTPUT_PER_EXPECTED = 8
"""Bytes for each expected character: digits of a float that was expected shorter, blanks, other alphabets."""
_TIMES_PATIENCE = 3.0
"""With a program that the machine was too busy for: the same wait would find it as busy."""


class CodeGrader:
    """Grades ``livecodebench`` prompts: reward 1 when the response's program passes all tests, else 0.

    A label that holds no tests, or a sandbox that cannot run programs, is an ERROR verdict. A program whose tests take
    longer than ``total_seconds`` of its own time together has failed.
    """

    def __init__(self, *, sandboxes: SandboxProvider, limits: ExecLimits, total_seconds: float = math.inf) -> None:
        self._sandboxes = sandboxes
        self._limits = limits
        self._total_seconds = total_seconds

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Run the last program of the response; it stops at the first test that fails."""
        if not isinstance(response, str):
            return Verdict.failed(f"the response is a {type(response).__name__}, not text")
        try:
            problem = parse_tests(label, metadata)
        except RewardError as error:
            return Verdict.failed(str(error))
        program = find_program(response)
        if program is None:
            detail = "no complete code block of Python in the response"
            return Verdict.graded(False, format_ok=False, detail=detail)
        try:
            fault = await self._first_fault(program, problem)
        except SandboxError as error:
            return Verdict.failed(str(error))
        detail = fault or f"passed all of {len(problem.tests)} tests"
        return Verdict.graded(not fault, extracted=program[:_MAX_EXTRACTED_CHARS], detail=detail)

    async def _first_fault(self, program: str, problem: CodeTests) -> str:
        taken = 0.0
        for number, test in enumerate(problem.tests, start=1):
            fault, seconds = await self._fault(program, problem.function, test)
            taken += seconds
            if not fault and taken > self._total_seconds:
                fault = f"not done within {self._total_seconds:g} s for all tests"
            if fault:
                return f"test {number} of {len(problem.tests)}: {fault}"
        return ""

    async def _fault(self, program: str, function: str | None, test: CodeTest) -> tuple[str, float]:
        """Return what is wrong with a program's answer to a test, if anything, and the time that it has taken."""
        mode = ["stdin"] if function is None else ["call", function]
        result = await self._run(program, mode, test)
        if result.outcome is ExecOutcome.STARVED:  # of which the program cannot be at fault
            result = await self._run(program, mode, test, times_patience=_TIMES_PATIENCE)
        if result.outcome is ExecOutcome.STARVED:
            raise SandboxError(f"the machine is too busy to run a program: twice none in {result.wall_seconds:.0f} s")
        failure = _failure(result, self._limits)
        if failure:
            return failure, result.own_seconds
        output = result.stdout.decode(errors="replace")
        right = same_output(output, test.expected) if function is None else _same_result(output, test.expected)
        fault = "" if right else f"wrong answer {output.strip()!r:.100}, expected {test.expected!r:.100}"
        return fault, result.own_seconds

    async def _run(
        self, program: str, mode: Sequence[str], test: CodeTest, *, times_patience: float = 1.0
    ) -> ExecResult:
        # One for each test: what a program leaves behind must not fail the next test, nor its sandbox.
        async with self._sandboxes.open() as sandbox:
            await sandbox.write("runner.py", _runner_source())
            await sandbox.write("solution.py", program.encode(errors="replace"))
            command = ["python3", "-I", "-S", "runner.py", *mode]
            limits = self._for(test, times_patience)
            return await sandbox.exec(command, stdin=test.stdin.encode(errors="replace"), limits=limits)

    def _for(self, test: CodeTest, times_patience: float) -> ExecLimits:
        """Return the limits with room for an answer that is itself long."""
        expected = test.expected if isinstance(test.expected, str) else json.dumps(test.expected)
        room = max(self._limits.max_output_bytes, _OUTPUT_PER_EXPECTED * len(expected))
        return replace(self._limits, max_output_bytes=room, patience=times_patience * self._limits.patience)


class InTurns:
    """Calls the grader a few times at once, each within a deadline from its turn."""

    def __init__(self, grader: CodeGrader, *, num_turns: int, timeout_seconds: float) -> None:
        self._grader = grader
        self._turns = asyncio.Semaphore(num_turns)
        self._timeout_seconds = timeout_seconds

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_seconds) as deadline:
                    return await self._grader(response, label, metadata)
            except TimeoutError:
                if not deadline.expired():
                    raise
                detail = f"the tests were not done within {self._timeout_seconds:g} s"
                return Verdict.failed(detail, Outcome.TIMEOUT)


def _failure(result: ExecResult, limits: ExecLimits) -> str:
    if result.outcome is ExecOutcome.TIMEOUT:
        return f"not done within {limits.wall_seconds:g} s"
    if result.outcome is not ExecOutcome.EXITED:
        return f"stopped: {result.outcome.value.replace('_', ' ')}"
    if result.exit_code != 0:
        last_line = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"exit code {result.exit_code}: {last_line:.200}"
    return ""


def _same_result(output: str, expected: Any) -> bool:
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return same_value(value, expected)


def find_program(response: str) -> str | None:
    """Return the last fenced block of Python, or None.

    Only the text after the reasoning is read. A fence that never closes means that the response was cut off, so that
    its last block is no program, whatever came before.
    """
    found = find_code(response.replace("\r\n", "\n"), languages=_PYTHON)
    return found if found is not None and found.strip() and len(found) <= MAX_CHARS else None


@cache
def _runner_source() -> bytes:
    return Path(runner.__file__).read_bytes()
