"""The tool ``python``: runs programs of the policy in a sandbox, each by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollfeed.errors import SandboxError, ToolError
from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult, IsolationLevel, SandboxProvider

_MAX_CHARS = 100_000
_MAX_OUTPUT_BYTES = 1 << 20
_FENCED = re.compile(r"\s*```(?:python|py)?\s*\n(.*?)\n?```\s*", re.DOTALL)

# Prints the value of a last expression, as an interpreter does, and of what it raises only the program's own lines.
_RUNNER = b"""\
import ast, sys, traceback
def tell(kind, error, trace):
    traceback.print_exception(kind, error, None if kind is SyntaxError else trace.tb_next)
sys.excepthook = tell
with open("program.py", encoding="utf-8") as file:
    tree = ast.parse(file.read(), "program.py")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
scope = {"__name__": "__main__"}
exec(compile(tree, "program.py", "exec"), scope)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "program.py", "eval"), scope)
    if value is not None:
        print(repr(value))
"""


class PythonTool:
    """Fits :class:`rollfeed.protocols.Tool`."""

    name = "python"
    description = (
        "Runs a Python program and returns what it prints, and the value of its last line. Each program runs by "
        "itself, without network, and nothing of it is left."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program"}},
        "required": ["code"],
        "additionalProperties": False,
    }
    keeps_time = True

    def __init__(self, sandboxes: SandboxProvider, *, limits: ExecLimits) -> None:
        self._sandboxes = sandboxes
        self._limits = replace(limits, max_output_bytes=_MAX_OUTPUT_BYTES)

    @property
    def is_idempotent(self) -> bool:
        """Whether a program leaves nothing behind: not where it sees the machine's files or network."""
        isolation = self._sandboxes.isolation
        return isolation.level is not IsolationLevel.LIMITS and isolation.files_hidden and isolation.network_cut

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return what the program printed.

        Raises:
            ToolError: If the program failed, with what it said.
            SandboxError: If it could not be run at all.
        """
        code: str = arguments["code"]
        if len(code) > _MAX_CHARS:
            raise ToolError(f"the program has more than {_MAX_CHARS:,} characters")
        if fenced := _FENCED.fullmatch(code):
            code = fenced[1]
        async with self._sandboxes.open() as sandbox:
            await sandbox.write("run.py", _RUNNER)
            await sandbox.write("program.py", code.encode(errors="replace"))
            result = await sandbox.exec(["python3", "-I", "run.py"], limits=self._limits)
        if result.outcome is ExecOutcome.STARVED:
            raise SandboxError("the machine is too busy to run a program")
        output = result.stdout.decode(errors="replace")
        if fault := self._fault(result):
            raise ToolError(f"{output.rstrip()}\n{fault}".strip())
        return output.strip("\n") or "(the program printed nothing)"

    def _fault(self, result: ExecResult) -> str:
        if result.outcome is ExecOutcome.TIMEOUT:
            return f"the program was not done within {self._limits.wall_seconds:g} s"
        if result.outcome is not ExecOutcome.EXITED:
            return f"the program was stopped: {result.outcome.value.replace('_', ' ')}"
        if result.exit_code:
            said = result.stderr.decode(errors="replace").strip()
            return said or f"the program ended with exit code {result.exit_code}"
        return ""
