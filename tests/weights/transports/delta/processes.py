"""Servers of the command line in processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import rollfeed


@asynccontextmanager
async def process_at(action: str, *arguments: str, most_kilobytes: int | None = None) -> AsyncIterator[tuple[Any, str]]:
    """Run `rollfeed serve`, with files of a limited size; give the process and its address."""
    limit = "" if most_kilobytes is None else f"ulimit -f {most_kilobytes}; "
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f'{limit}exec "$@"', "serve", sys.executable, "-m", "rollfeed", "serve", action),
        *(*arguments, "--port", "0"),
        env={**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        said, words = "", [""]
        while not (words[0] in ("serving", "receiving") and "at" in words):
            line = (await process.stderr.readline()).decode()
            assert line, said
            said, words = said + line, line.split()
        yield process, words[words.index("at") + 1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
