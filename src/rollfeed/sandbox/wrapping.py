"""Wraps the command line of a program, by isolation level: the part of this machine that it sees, and its user."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, IsolationLevel
from rollfeed.sandbox import launcher
from rollfeed.sandbox.own_mounts import OwnMounts
from rollfeed.sandbox.system_calls import seccomp_filter

BOX = "/box"
"""The sandbox's folder, as programs see it where the machine's files are hidden."""
_USER_OFFSET = 0x6000_0000
_MAX_LIBRARIES = 64
_SHARED_MEMORY_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Mount:
    """One piece of a program's file system."""

    kind: str
    """``folder``, ``file``, ``symlink`` or ``tmpfs``."""
    at: str
    source: str = ""
    writable: bool = False
    mode: str = "755"
    size: int = 0
    """Bytes of a ``tmpfs``."""
    num_files: int = 0
    """Of a ``tmpfs``, where it is made here; bubblewrap cannot say it."""


def wrap(
    level: IsolationLevel,
    command: Sequence[str],
    *,
    folder: Path,
    user: int | None,
    marker: str,
    limits: ExecLimits,
    status: int,
    entrances: Sequence[int] = (),
    core: int | None = None,
    mounts: OwnMounts | None = None,
    temporary: Path | None = None,
    places: Sequence[str] = (),
    has_network: bool = False,
) -> list[str]:
    """Return the command line that runs ``command`` at ``level`` within ``limits``.

    ``marker`` goes into the program's environment, to know its processes by; the launcher writes to the descriptor
    ``status`` how far it got, joins the control groups of ``entrances`` and keeps to ``core``. Of ``mounts`` are the
    folder and ``temporary``, which has the temporary folders. Where the machine's
    files are hidden, the program may write to ``places`` instead of :data:`BOX`, folders that are below the sandbox's;
    the first is its home.
    """
    hidden = level is not IsolationLevel.LIMITS
    pieces = (*system_mounts(), *private_mounts(folder, places, temporary=temporary, limits=limits))
    shared = shared_memory(temporary, limits)
    home, writable = ((*places, BOX)[0], "/tmp") if hidden else (str(folder), str(folder))
    environment = _environment(home, writable, marker)
    root = ""
    if level is IsolationLevel.NAMESPACES:
        root = json.dumps({"at": str(folder.parent / "root"), "mounts": _root_mounts(pieces, shared)})
    python = [
        *(interpreter(), "-I", "-S", "-c", _launcher_source()),
        str(status),
        ",".join([os.readlink("/proc/self/ns/mnt"), *([mounts.namespace] if mounts else [])]) if hidden else "",
        home,
        "" if user is None else str(user),
        "1" if not hidden and user is None else "0",
        "1" if level is IsolationLevel.BUBBLEWRAP else "0",
        "1" if hidden else "0",
        root,
        ",".join(f"{name}={value}" for name, value in _resources(limits).items()),
        seccomp_filter().hex(),
        ",".join(map(str, entrances)),
        "" if core is None else str(core),
        str(len(environment)),
        *(f"{name}={value}" for name, value in environment.items()),
        interpreter() if command[0] == "python3" else command[0],
        *command[1:],
    ]
    prefix = mounts.prefix if mounts else ()
    if level is IsolationLevel.BUBBLEWRAP:
        bubblewrap = _bubblewrap(pieces, shared, as_root=user is not None, has_network=has_network)
        return [*prefix, *bubblewrap, "--", *python]
    if level is IsolationLevel.NAMESPACES:
        return [*prefix, *_unshare(as_root=user is not None, has_network=has_network), "--", *python]
    return python


def _environment(home: str, temporary: str, marker: str) -> Mapping[str, str]:
    folders = [str(Path(interpreter()).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": os.pathsep.join(dict.fromkeys(folders)),
        "HOME": home,
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "ROLLFEED_SANDBOX": marker,
    }


def _resources(limits: ExecLimits) -> dict[str, int]:
    cpu_seconds = limits.wall_seconds if limits.cpu_seconds is None else limits.cpu_seconds
    return {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": int(cpu_seconds) + 1,
        "RLIMIT_NPROC": limits.max_processes,
        "RLIMIT_FSIZE": limits.max_file_bytes,
        "RLIMIT_NOFILE": limits.max_open_files,
        "RLIMIT_CORE": 0,
    }


def _bubblewrap(mounts: Sequence[Mount], shared: Mount, *, as_root: bool, has_network: bool) -> list[str]:
    arguments = [_tool("bwrap"), "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    arguments += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += [] if has_network else ["--unshare-net"]
    if as_root:  # only to become another user, which the launcher does before anything else
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", *(["--disable-userns"] if _knows_disable_userns(arguments[0]) else [])]
    made: set[str] = {"/"}
    for mount in mounts:
        # Said for each, because bwrap closes the folders above a private one, such as root's home, to others.
        for parent in reversed(Path(mount.at).parents):
            if str(parent) not in made:
                arguments += ["--perms", "0755", "--dir", str(parent)]
                made.add(str(parent))
        made.add(mount.at)
        arguments += _bubblewrap_mount(mount)
    arguments += ["--proc", "/proc", "--dev", "/dev", *_bubblewrap_mount(shared)]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/"]


def _bubblewrap_mount(mount: Mount) -> list[str]:
    if mount.kind == "symlink":
        return ["--symlink", mount.source, mount.at]
    if mount.kind == "tmpfs":
        return ["--perms", f"0{mount.mode}", "--size", str(mount.size), "--tmpfs", mount.at]
    return ["--bind" if mount.writable else "--ro-bind", mount.source, mount.at]


@cache
def _knows_disable_userns(bwrap: str) -> bool:
    """Whether this bubblewrap, 0.8 or later, can keep programs from user namespaces besides by our filter."""
    asked = subprocess.run([bwrap, "--help"], capture_output=True, check=False, timeout=60)
    return b"--disable-userns" in asked.stdout + asked.stderr


def _unshare(*, as_root: bool, has_network: bool) -> list[str]:
    arguments = []
    if (setpriv := shutil.which("setpriv")) is not None:
        arguments += [setpriv, "--pdeathsig", "KILL", "--"]
    arguments += [_tool("unshare"), "--mount", *([] if has_network else ["--net"]), "--pid", "--ipc", "--uts", "--fork"]
    return [*arguments, "--kill-child=SIGKILL", *([] if as_root else ["--user", "--map-root-user"])]


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SandboxError(f"{name} is not installed any more")
    return found


def _root_mounts(mounts: Sequence[Mount], shared: Mount) -> list[dict[str, Any]]:
    return [asdict(mount) for mount in (*mounts, Mount("tmpfs", "/dev", size=65_536, num_files=32), shared)]


@cache
def _launcher_source() -> str:
    return Path(launcher.__file__).read_text(encoding="utf-8")


def interpreter() -> str:
    """Return the Python interpreter itself, outside of any virtual environment."""
    return os.path.realpath(sys.executable)


@cache
def system_mounts() -> tuple[Mount, ...]:
    """Return the system's programs and libraries and the interpreter's, all read-only, and no home."""
    mounts = [Mount("folder", "/usr", "/usr")]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            mounts.append(Mount("symlink", path, os.readlink(path)))
        elif os.path.isdir(path):
            mounts.append(Mount("folder", path, path))
    for path in ("/etc/ld.so.cache", "/etc/localtime"):
        if os.path.isfile(path):
            mounts.append(Mount("file", path, os.path.realpath(path)))
    if os.path.isdir("/etc/alternatives"):
        mounts.append(Mount("folder", "/etc/alternatives", "/etc/alternatives"))
    own = [Path(interpreter()).parents[1], *(Path(path).resolve() for path in (sys.base_prefix, sys.base_exec_prefix))]
    for folder in dict.fromkeys(own):
        if not any(folder.is_relative_to(mount.at) for mount in mounts if mount.kind == "folder"):
            mounts += _interpreter_mounts(folder)
    return tuple(mounts)


def _interpreter_mounts(prefix: Path) -> list[Mount]:
    """Return what an interpreter that is installed in a folder needs of it, and nothing that others put there."""
    program, mounts = Path(interpreter()), []
    if program.is_relative_to(prefix):
        mounts.append(Mount("file", str(program), str(program)))
        names = {"python3", "python"} - {program.name}
        mounts += [Mount("symlink", str(program.with_name(name)), program.name) for name in sorted(names)]
    if not Path.home().resolve().is_relative_to(prefix):  # a folder of the interpreter's own
        return mounts + [Mount("folder", str(each), str(each)) for each in _folders(prefix / "lib", prefix / "lib64")]
    modules = Path(os.__file__).resolve().parent
    mounts += [Mount("folder", str(each), str(each)) for each in _folders(modules) if each.is_relative_to(prefix)]
    libraries = sorted(each for each in (prefix / "lib").glob("lib*.so*") if each.is_file())[:_MAX_LIBRARIES]
    return mounts + [Mount("file", str(each), str(each.resolve())) for each in libraries]


def _folders(*paths: Path) -> list[Path]:
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def private_mounts(
    folder: Path, places: Sequence[str] = (), *, temporary: Path | None, limits: ExecLimits
) -> tuple[Mount, ...]:
    """Return the places to write to: the sandbox's folder and temporary ones that a program's end empties, or these."""
    if places:  # not the folder as well: a program must not be able to put a link in the place of one
        return tuple(Mount("folder", place, f"{folder}{place}", writable=True) for place in places)
    box = Mount("folder", BOX, str(folder), writable=True)
    if temporary is not None:
        return (Mount("folder", "/tmp", f"{temporary}/tmp", writable=True), box)
    return (Mount("tmpfs", "/tmp", mode="1777", size=limits.max_file_bytes, num_files=limits.max_files), box)


def shared_memory(temporary: Path | None, limits: ExecLimits) -> Mount:
    """Return the place of shared memory, which is a file system of its own where ``temporary`` has none."""
    if temporary is not None:
        return Mount("folder", "/dev/shm", f"{temporary}/shm", writable=True)
    return Mount("tmpfs", "/dev/shm", mode="1777", size=_SHARED_MEMORY_BYTES, num_files=limits.max_files)


def pick_user() -> int | None:
    """Return a user number that nobody has, for programs that root starts; None when this process is not root.

    The kernel does not count root's processes, and a program must not be able to signal us.
    """
    if os.geteuid() != 0:
        return None
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").split("\n")
        start, _, size = max(([int(word) for word in line.split()] for line in lines if line), key=lambda row: row[2])
    except (OSError, ValueError):
        start, size = 0, 65_536
    offset = min(size // 2, _USER_OFFSET)
    return start + offset + random.SystemRandom().randrange(min(size // 4, 1 << 28))
