"""Keeps the files of a sandbox, and returns to them; works in every sandbox that has ``tar``."""

from __future__ import annotations

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, Sandbox

_LIMITS = ExecLimits(wall_seconds=60.0, max_output_bytes=256 * 1024**2, max_file_bytes=256 * 1024**2)
_CLEAR = "find . -mindepth 1 -delete"


async def take_snapshot(sandbox: Sandbox) -> bytes:
    """Return the sandbox's folder as a tar archive.

    Raises:
        SandboxError: If it cannot be read or is too large.
    """
    return await _run(sandbox, ["tar", "-cf", "-", "."], stdin=b"")


async def restore_snapshot(sandbox: Sandbox, snapshot: bytes) -> None:
    """Make a sandbox's folder what it was when ``snapshot`` was taken, in this sandbox or another.

    Raises:
        SandboxError: If the archive cannot be unpacked; the folder is then undefined.
    """
    await _run(sandbox, ["sh", "-c", f"{_CLEAR} && tar -xf -"], stdin=snapshot)


async def _run(sandbox: Sandbox, command: list[str], *, stdin: bytes) -> bytes:
    result = await sandbox.exec(command, stdin=stdin, limits=_LIMITS)
    if result.outcome is not ExecOutcome.EXITED or result.exit_code != 0:
        said = " ".join(result.stderr[-500:].decode(errors="replace").split())
        raise SandboxError(f"{command[0]} failed in the sandbox ({result.outcome.value}): {said}")
    return result.stdout
