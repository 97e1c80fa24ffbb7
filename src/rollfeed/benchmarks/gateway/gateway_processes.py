"""The processes of ``rollfeed bench gateway``: a fake engine, a gateway, a server that echoes, and agents."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from rollfeed.benchmarks.machine import CommandProcess, command_environment, free_port, is_listening
from rollfeed.errors import ConfigError, EngineUnavailableError, RunFailedError
from rollfeed.types import Sample

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '\n<tool_call>\n{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Of a model that knows tools."""
ENGINE, ECHO, AGENTS = "fake_policy", "gateway_processes", "agent_process"
_START_SECONDS, _POLL_SECONDS = 60.0, 0.05
_PROGRAM = "from rollfeed.benchmarks.gateway.{} import main; main()"


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken, user and system, all its threads.

    Raises:
        ConfigError: If this system does not tell.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError as error:
        raise ConfigError(f"the processor time of another process is only known on Linux: {error}") from None
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(program: str, arguments: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Run one of the servers beside this module in a process of its own; give its address and the process's number.

    Raises:
        EngineUnavailableError: If it does not get to listening.
    """
    with _start(program, arguments) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            if not address:
                raise EngineUnavailableError(f"the {program} process ended with code {process.wait()}")
            yield address, process.pid
        finally:
            process.kill()


def run_agents(job: msgspec.Struct) -> None:
    """Run agents in a process of their own until they have ended. Raises RunFailedError if one of them fails."""
    with _start(AGENTS, []) as process:
        try:
            process.communicate(msgspec.json.encode(job))
        finally:
            process.kill()
    if process.returncode:
        raise RunFailedError(f"the agents' process ended with code {process.returncode}")


def _start(program: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    # Servers end when their standard input is closed, and so with this process.
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=command_environment(),
    )


def write_model(folder: Path, model: Path) -> None:
    """Make the folder of a model without weights: the tokenizer of another, and a chat template that shows tools."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


class GatewayProcess(CommandProcess):
    """``rollfeed serve gateway``, of one folder and port for all its processes. Entering starts it, leaving kills it.

    ``folder`` is new and has its sessions and log; without the address of an engine, it has the embedded one.
    """

    def __init__(self, folder: Path, *, model: Path, engine: str | None = None, context_length: int = 1 << 17) -> None:
        self.folder = folder
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        options = {"--model": model, "--folder": folder, "--port": self._port}
        options |= {"--served-name": "policy", "--context-length": context_length}
        options |= {} if engine is None else {"--engine": engine}
        words = [word for option in options.items() for word in option]
        super().__init__(["serve", "gateway", *words], log=folder.with_name(f"{folder.name}.log"))

    def start(self) -> None:
        """Start it, and return when it listens. Raises EngineUnavailableError if it does not within a minute."""
        super().start()
        deadline = time.monotonic() + _START_SECONDS
        while not is_listening(self._port):
            if time.monotonic() > deadline or self.has_ended:
                raise EngineUnavailableError(f"the gateway is not there: {self.last_words()}")
            time.sleep(_POLL_SECONDS)

    def samples(self) -> list[Sample]:
        """Return the samples of the sessions that were finished."""
        lines = (self.folder / "samples.jsonl").read_bytes().splitlines()
        return [Sample.from_dict(msgspec.json.decode(line)) for line in lines]


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read(), content_type="application/json")


def main() -> None:
    """Serve what echoes, until killed."""
    application = web.Application(client_max_size=1 << 30)
    application.router.add_post("/", _echo)
    server = web.AppRunner(application, access_log=None)

    async def serve() -> None:
        await server.setup()
        site = web.TCPSite(server, "127.0.0.1", 0)
        await site.start()
        host, port = server.addresses[0][:2]
        print(f"http://{host}:{port}/", flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(serve())
