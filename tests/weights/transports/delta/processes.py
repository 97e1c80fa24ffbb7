"""Servers of the command line in processes of their own, and receivers in this one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from aiohttp import web

import rollfeed
from rollfeed.base.serving import serve_application
from rollfeed.weights.transports.delta import CheckpointStore, DeltaReceiver


@asynccontextmanager
async def process_at(
    action: str, *arguments: str, most_kilobytes: int | None = None, program: str | None = None
) -> AsyncIterator[tuple[Any, str]]:
    """Run `rollfeed serve`, or a program that ends in it, with files of a limited size; give process and address."""
    limit = "" if most_kilobytes is None else f"ulimit -f {most_kilobytes}; "
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f'{limit}exec "$@"', "serve", sys.executable),
        *(("-m", "rollfeed") if program is None else ("-c", program)),
        *("serve", action, *arguments, "--port", "0"),
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


@asynccontextmanager
async def receiver_at(root: Path, *, key: str | None = None, port: int = 0) -> AsyncIterator[str]:
    """Receive into a folder; give the address."""
    with closing(CheckpointStore(root)) as store:
        application = web.Application()
        application.add_routes(DeltaReceiver(store).routes())
        async with serve_application(application, host="127.0.0.1", port=port, key=key) as address:
            yield address
