"""A small server that is started as SGLang is: it refuses flags, and can be slow, die and leave processes behind."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web
from tests.engine.sglang.conftest import ScriptedServer


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--served-model-name", "--calls", "--tp-size"):
        parser.add_argument(name)
    parser.add_argument("--enable-metrics", action="store_true", required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--ends-when-asked", action="store_true", help="for tokens")
    parser.add_argument("--dies-in-updates", help="as long as this file is not there, which it then is")
    parser.add_argument("--raises", action="store_true")
    parser.add_argument("--busy", action="store_true", help="cannot flush")
    parser.add_argument("--grandchild", action="store_true", help="leaves a process in a session of its own")
    for name in ("--enable-memory-saver", "--enable-weights-cpu-backup"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args()


class StandIn(ScriptedServer):
    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.port, self._given = given.port, given
        self.generate = self.end if given.ends_when_asked else self.answer_whole

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._note(request.path)
        if request.path in ("/release_memory_occupation", "/resume_memory_occupation"):
            return web.json_response(None)
        if request.path == "/flush_cache":
            return web.Response(status=400 if self._given.busy else 200)
        return await super()._handle(request)

    async def end(self, request: web.Request) -> web.StreamResponse:
        os._exit(7)

    def _note(self, path: str) -> None:
        if self._given.calls:
            with Path(self._given.calls).open("a") as calls:
                print(path, file=calls)
        marker = self._given.dies_in_updates
        if path == "/update_weights_from_disk" and marker and not Path(marker).exists():
            Path(marker).touch()
            os._exit(9)


async def serve(given: argparse.Namespace) -> None:
    server = StandIn(given)
    await server.start()
    print(json.dumps({"serving": given.port}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    given = parsed()
    if given.grandchild:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if given.raises:
        raise RuntimeError("no kernel image is available")
    time.sleep(given.slow)
    asyncio.run(serve(given))


if __name__ == "__main__":
    main()
