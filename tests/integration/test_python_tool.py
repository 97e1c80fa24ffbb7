"""The tool ``python`` runs programs in the sandbox, and tells what they print or why they do not."""

from __future__ import annotations

import pytest

from rollfeed.errors import ToolError
from rollfeed.protocols import ExecLimits
from rollfeed.sandbox import OnDemandSandboxes
from rollfeed.tools.python import PythonTool


@pytest.fixture
async def tool() -> PythonTool:
    sandboxes = OnDemandSandboxes(level=None, max_running=2, container=None)
    await sandboxes.start()
    return PythonTool(sandboxes, limits=ExecLimits(wall_seconds=120.0, memory_bytes=512 << 20))


async def test_what_a_program_prints_and_its_last_value_are_the_answer(tool: PythonTool) -> None:
    for code, answer in (
        ("print(6 * 7)", "42"),
        ("x = [1, 2]\nx + ['é']", "[1, 2, 'é']"),
        ("print('a')\nNone", "a"),
        ("```python\nimport math\nmath.factorial(5)\n```", "120"),
        ("def f(n):\n    return n\nf(3)", "3"),
        ("x = 1", "(the program printed nothing)"),
        ("", "(the program printed nothing)"),
    ):
        assert await tool.call({"code": code}) == answer
    assert tool.is_idempotent is (tool._sandboxes.isolation.files_hidden and tool._sandboxes.isolation.network_cut)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "print('before')\n1 / 0",
            'before\nTraceback (most recent call last):\n  File "program.py", line 2, in <module>\n',
        ),
        ("x = (", "SyntaxError"),
        ("import sys\nsys.exit(3)", "the program ended with exit code 3"),
        ("while True: print('a' * 1000)", "the program was stopped: output limit"),
        ("open('x', 'wb').write(b'a' * 100); open('y.txt').read()", "FileNotFoundError"),
        ("\x00", "null bytes"),
        ("x" * 200_000, "more than 100,000 characters"),
    ],
)
async def test_why_a_program_did_not_end_well_is_told(tool: PythonTool, code: str, told: str) -> None:
    with pytest.raises(ToolError) as failed:
        await tool.call({"code": code})
    assert told in str(failed.value)


async def test_a_program_that_hangs_is_ended() -> None:
    sandboxes = OnDemandSandboxes(level=None, max_running=2, container=None)
    tool = PythonTool(sandboxes, limits=ExecLimits(wall_seconds=0.3))
    with pytest.raises(ToolError, match=r"was not done within 0\.3 s"):
        await tool.call({"code": "while True: pass"})
