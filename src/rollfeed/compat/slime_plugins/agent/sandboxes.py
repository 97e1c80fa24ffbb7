"""slime's sandboxes: the protocol, this machine's and E2B's, and commands that outlive a connection."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import secrets
import shlex
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self, cast, runtime_checkable

from rollfeed.base.importing import import_object
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError
from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, Isolation
from rollfeed.protocols import Sandbox as Box
from rollfeed.sandbox import LocalSandboxes, start_sandboxes

Env = Mapping[str, str]
EXIT_TIME_BUDGET_EXCEEDED = -1
_BACKEND = "SLIME_AGENT_SANDBOX_BACKEND"
_PLACES = ("/home/agent", "/workspace", "/testbed", "/app", "/tmp")
_MOST_AT_ONCE = 16
_LIMITS = ExecLimits(
    patience=1.0,
    cpu_seconds=1e6,
    memory_bytes=1 << 40,  # this bounds address space, of which JavaScript takes much
    max_processes=1024,
    max_output_bytes=1 << 26,
    max_file_bytes=1 << 34,
    max_files=1_000_000,
    max_open_files=4096,
)
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.1, 5.0
_found: list[Isolation] = []
"""The isolation that holds on this machine, once it has been tried."""


@runtime_checkable
class AgentSandbox(Protocol):
    """A sandbox as slime has it, entered and left as a context; other classes need not inherit from it."""

    sandbox_id: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *raised: object) -> None: ...

    async def exec(
        self, cmd: str, *, user: str = "root", env: Env | None = None, timeout: float = 120, check: bool = False
    ) -> tuple[int, str, str]:
        """Run a command of bash; return its exit code, standard output and standard error.

        Raises RuntimeError if it fails and ``check``, and TimeoutError if it takes longer.
        """
        ...

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write a text, bytes, or what a file of this machine has."""

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file, empty where there is none."""
        ...


class _CommandSandbox(ABC):
    """A sandbox of one way to run a command, and one to write a file."""

    async def exec(
        self, cmd: str, *, user: str = "root", env: Env | None = None, timeout: float = 120, check: bool = False
    ) -> tuple[int, str, str]:
        code, told, wrong = await self._run(cmd, user, env or {}, timeout)
        if check and code:
            raise RuntimeError(f"{cmd:.120}: exit code {code}: {wrong[-400:].strip()}")
        return code, told, wrong

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        whole = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        await self._write(sandbox_path, whole.encode() if isinstance(whole, str) else whole, user)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        code, told, _ = await self.exec(f"cat -- {shlex.quote(sandbox_path)}", user=user)
        return told if code == 0 else ""

    @abstractmethod
    async def _run(self, cmd: str, user: str, env: Env, timeout: float) -> tuple[int, str, str]: ...

    @abstractmethod
    async def _write(self, path: str, content: bytes, user: str) -> None: ...


class LocalAgentSandbox(_CommandSandbox):
    """A sandbox of this machine: its programs and network, and files of its own in a few folders.

    All users are one, what a command has started ends with it, and an ``image`` is accepted and not used.
    """

    def __init__(self, image: str = "") -> None:
        self.image, self.sandbox_id = image, f"local-{secrets.token_hex(6)}"
        self._within = AsyncExitStack()
        self._box: Box

    async def __aenter__(self) -> Self:
        isolation = _found[0] if _found else (await start_sandboxes()).isolation
        if not isolation.files_hidden:
            raise SandboxError("agents would see this machine's files: install bubblewrap")
        _found[:] = [isolation]
        boxes = LocalSandboxes(isolation=isolation, max_running=_MOST_AT_ONCE, places=_PLACES, has_network=True)
        self._box = await self._within.enter_async_context(boxes.open())
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._within.aclose()

    async def _run(self, cmd: str, user: str, env: Env, timeout: float) -> tuple[int, str, str]:
        script = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items()) + cmd
        # Not as an argument, which the system bounds to 128 KiB.
        limits, command = replace(_LIMITS, wall_seconds=timeout), ["bash", "-c", 'eval "$(cat)"']
        result = await self._box.exec(command, stdin=script.encode(), limits=limits)
        if result.outcome is ExecOutcome.TIMEOUT:
            raise TimeoutError(f"{cmd:.80}: has not ended within {timeout:g} s")
        if result.exit_code is None:
            raise SandboxError(f"{cmd:.80}: ended by {result.outcome.value}")
        code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
        return code, result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")

    async def _write(self, path: str, content: bytes, user: str) -> None:
        if not any(Path(path).is_relative_to(place) for place in _PLACES):
            raise SandboxError(f"{path!r:.200} cannot be written: files are below {', '.join(_PLACES)}")
        await self._box.write(path.lstrip("/"), content)


class E2BSandbox(_CommandSandbox):
    """A sandbox of E2B's service, through its package; a call whose connection breaks is tried again.

    The variables ``SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY``, ``LIFETIME_SEC`` (an hour) and ``RPC_RETRIES`` (3 tries)
    say what is not given. Raises SlimeUseError if the package or the key is missing.
    """

    def __init__(
        self, image: str, *, timeout: int = 0, image_metadata_key: str | None = None, rpc_retries: int = 0
    ) -> None:
        given = {name.removeprefix("SLIME_AGENT_SANDBOX_"): value for name, value in os.environ.items()}
        try:
            self._e2b: Any = importlib.import_module("e2b")
        except ImportError:
            raise SlimeUseError(f"E2BSandbox: pip install e2b, or use make_sandbox and {_BACKEND}=local") from None
        self.image, self.image_metadata_key = image, image_metadata_key or given.get("IMAGE_METADATA_KEY")
        if not self.image_metadata_key:
            raise SlimeUseError("E2BSandbox: set SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY to the key of images")
        self.timeout = timeout or int(given.get("LIFETIME_SEC", 3600))
        self.rpc_retries = rpc_retries or int(given.get("RPC_RETRIES", 3))
        self.sandbox_id, self._box = "", cast(Any, None)

    async def __aenter__(self) -> Self:
        create, metadata = self._e2b.AsyncSandbox.create, {self.image_metadata_key: self.image}
        self._box = await self._try(lambda: create(timeout=self.timeout, metadata=metadata))
        self.sandbox_id = self._box.sandbox_id
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._try(self._box.kill)

    async def _run(self, cmd: str, user: str, env: Env, timeout: float) -> tuple[int, str, str]:
        run = self._box.commands.run
        try:
            done = await self._try(lambda: run(cmd, user=user, envs=dict(env), timeout=timeout))
        except self._e2b.CommandExitException as error:
            done = error
        except self._e2b.TimeoutException as error:
            if type(error) is not self._e2b.TimeoutException:  # the sandbox is away
                raise
            raise TimeoutError(f"{cmd:.80}: {error}") from error
        return done.exit_code, done.stdout or "", done.stderr or ""

    async def _write(self, path: str, content: bytes, user: str) -> None:
        await self._try(lambda: self._box.files.write(path, io.BytesIO(content), user=user))

    async def _try(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Call the service, again where the connection breaks."""
        for tried in range(1, self.rpc_retries):
            try:
                return await call()
            except Exception as error:
                if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "ssl"):
                    raise
            await asyncio.sleep(2**tried / 4)
        return await call()


def make_sandbox(image: str) -> AgentSandbox:
    """Return a sandbox to be entered: ``SLIME_AGENT_SANDBOX_BACKEND`` is ``e2b``, ``local``, or a class by import path.

    Raises SlimeUseError if it is neither.
    """
    named = os.environ.get(_BACKEND, "e2b").strip()
    own = {"e2b": E2BSandbox, "local": LocalAgentSandbox}.get(named.lower())
    if own is None and "." not in named:
        raise SlimeUseError(f"{_BACKEND} = {named!r}: there is e2b, local, or a class by its import path")
    make: Callable[[str], AgentSandbox] = own or import_object(":".join(named.rsplit(".", 1)), key=_BACKEND)
    return make(image)


async def ensure_agent_user(sb: AgentSandbox, workdir: str) -> None:
    """Have a user ``agent`` who owns the working folder and may use git there."""
    folder = shlex.quote(workdir)
    make = "(id -u agent || useradd -m -s /bin/bash agent) && "
    own = f" && chown -R agent:agent /home/agent {folder} && git config --system --add safe.directory '*'"
    make, own = ("", "") if isinstance(sb, LocalAgentSandbox) else (make, own)
    await sb.exec(f"{make}mkdir -p {folder}{own}", check=True)


async def exec_and_wait(
    sb: AgentSandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "root",
    env: Env | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run a command to its end, also where that is longer than a connection lasts.

    Returns:
        Its exit code, -1 where time is up; and its output if ``want_output``, or the end of that if it failed.
    """
    base = f"/tmp/.{tag}-{secrets.token_hex(6)}"
    out = shlex.quote(out_file or f"{base}.out")
    home = "/root" if user == "root" else f"/home/{user}"
    script = f"(\ncd {shlex.quote(workdir)} && export HOME={home} || exit\n" if workdir else "(\n"
    script = f"{script}{cmd}\n) < /dev/null > {out} 2>&1"
    if not isinstance(sb, LocalAgentSandbox):
        code = await _detached(sb, script, base, user=user, env=env, seconds=time_budget_sec)
    else:  # which is asked through no connection
        try:
            code, _, _ = await sb.exec(script, env=env, timeout=time_budget_sec)
        except TimeoutError:
            code = EXIT_TIME_BUDGET_EXCEEDED
    if code == 0 and not want_output:
        return code, ""
    _, told, _ = await sb.exec(f"{'cat' if want_output else 'tail -c 512'} {out}", user=user)
    return code, told


async def _detached(sb: AgentSandbox, script: str, base: str, *, user: str, env: Env | None, seconds: float) -> int:
    """Start a script in a session of its own, which ends with this call, and return the exit code that a file says."""
    pause, ends = _FIRST_POLL_SECONDS, True
    # What ends it takes the folder away first: it knows the number of this shell then, or this shell does not begin.
    script = f"echo $$ > {base}/pid || exit\n{script}\necho $? > {base}/code\nmv {base}/code {base}/done\n"
    await sb.write_file(f"{base}.sh", script, user=user)
    # The folder is the mark that it was started: a call whose connection breaks is sent again.
    start = f"mkdir {base} || exit 0; setsid bash {base}.sh < /dev/null > /dev/null 2>&1 &"
    try:
        async with asyncio.timeout(seconds) as budget:
            await sb.exec(start, user=user, env=env, check=True)
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
                missing, told, _ = await sb.exec(f"cat {base}/done", user=user)
                if not missing:
                    ends = False
                    return int(told)
    except TimeoutError:
        if not budget.expired():  # a call has taken too long
            raise
        return EXIT_TIME_BUDGET_EXCEEDED
    finally:
        kill = f"mv {base} {base}.ended; kill -KILL -- -$(cat {base}.ended/pid); " if ends else ""
        await sb.exec(f"{kill}rm -rf {base} {base}.ended {base}.sh", user=user)


Sandbox = AgentSandbox
"""As slime calls it."""
