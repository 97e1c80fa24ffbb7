"""The last step before a program of a model: runs inside the isolation, sets the limits and becomes the program.

Its source is handed to ``python -I -S -c``, once for every program, so it imports no more than it needs. Its
arguments are those of ``launch``, in order. What it writes to the status descriptor tells the parent how far it got:
``started`` just before the program takes over, else the reason why it did not.
"""

from __future__ import annotations

import _ctypes  # the public modules cost as much time as all the rest
import _signal  # type: ignore[import-not-found]
import os
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SYS_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# As statvfs and as mount have them: nodev, noexec, noatime, nodiratime, relatime.
_KEPT_FLAGS = {0x4: 4, 0x8: 8, 0x400: 1024, 0x800: 2048, 0x1000: 1 << 21}


def launch(
    status: str,
    outside: str,
    cwd: str,
    user: str,
    user_wide: str,
    guarded: str,
    is_init: str,
    root: str,
    limits: str,
    system_calls: str,
    entrances: str,
    core: str,
    num_env: str,
    *rest: str,
) -> None:
    """Become a program.

    Args:
        status: Number of the descriptor to report to.
        outside: Mount namespaces that are not the program's own, separated by commas, or nothing where it has none.
        cwd: Where the program starts.
        user: Number to become, or nothing.
        user_wide: ``1`` where processes count for the whole user.
        guarded: ``1`` where what started this process keeps it from new privileges and ends it with the parent.
        is_init: ``1`` where this process is the first of its process namespace.
        root: JSON of the mounts to make a root from, or nothing.
        limits: Resources as ``NAME=value``, separated by commas.
        system_calls: The seccomp filter, eight bytes an instruction, in hexadecimal digits; or nothing.
        entrances: Descriptors of control groups to join, separated by commas.
        core: The number of the one core to run on, or nothing.
        num_env: How many of the ``rest`` are the environment, as ``NAME=value``.
        rest: Environment, then the command.
    """
    descriptor = int(status)
    if outside:
        refuse_outside(outside)
    _join(entrances, core)
    if root:
        if not outside:
            raise PermissionError("a root is made in a mount namespace of one's own only")
        _enter_root(root)
        _renounce_capabilities()
    if is_init == "1":
        _stay_as_reaper()
    _become(user, guarded=guarded == "1")
    os.umask(0o022)
    os.chdir(cwd)
    os.set_inheritable(descriptor, False)
    _limit_all(limits, user_wide=user_wide == "1")
    environment = dict(entry.split("=", 1) for entry in rest[: int(num_env)])
    command = rest[int(num_env) :]
    program = _find(command[0], environment["PATH"])
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # this interpreter ignores them, and the program would inherit it
        _signal.signal(number, _signal.SIG_DFL)
    _leave_keys()
    if system_calls:
        _refuse_system_calls(bytes.fromhex(system_calls))
    os.write(descriptor, b"started")
    os.execve(program, command, environment)


def refuse_outside(mount_namespaces: str) -> None:
    """See to it that what follows, which changes the root, can only change our own and never the machine's.

    Args:
        mount_namespaces: The machine's, and others that are not our own, separated by commas.

    Raises:
        PermissionError: If this process is in one of them, or is not the first of a process namespace of its own.
    """
    if os.readlink("/proc/self/ns/mnt") in mount_namespaces.split(","):
        raise PermissionError("the launcher is still in the machine's mount namespace")
    if os.getpid() != 1:
        raise PermissionError("the launcher is not the first of its own process namespace")


def _renounce_capabilities() -> None:
    """See to it that the program has none, though it is root of its user namespace: it could undo the mounts."""
    for number in range(64):
        _call("prctl", _PR_CAPBSET_DROP, number, 0, 0, 0)


def _become(user: str, *, guarded: bool) -> None:
    if user:
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    if not guarded:
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # After the change of user, which would clear it.
        _call("prctl", _PR_SET_PDEATHSIG, int(_signal.SIGKILL), 0, 0, 0)


def _leave_keys() -> None:
    """Have a session keyring of our own instead of the machine's user's, whose keys a program could ask for."""
    if (number := _SYS_KEYCTL.get(os.uname().machine)) is not None:
        _call("syscall", number, _JOIN_SESSION_KEYRING, None)  # fails where there are no keys, or no more of them


def _refuse_system_calls(code: bytes) -> None:
    """Load a seccomp filter, for this process and all that come of it. Raises PermissionError if it cannot be."""
    where = id(code) + bytes.__basicsize__ - 1  # of its first byte, in this interpreter
    program = (len(code) // 8).to_bytes(8, "little") + where.to_bytes(8, "little")
    if _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) != 0:
        raise PermissionError("this kernel takes no filter of system calls (seccomp)")


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library, of numbers below 2^31 and texts."""
    return int(_ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 0), name), arguments))  # type: ignore[arg-type]


def load_libc() -> Any:
    """Return the C library, whose errors ``ctypes.get_errno`` tells."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _find(name: str, path: str) -> str:
    candidates = [name] if "/" in name else [f"{folder}/{name}" for folder in path.split(":")]
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(f"there is no program {name}")


def _join(entrances: str, core: str) -> None:
    for entrance in filter(None, entrances.split(",")):
        os.write(int(entrance), b"0")
        os.close(int(entrance))
    if core:
        os.sched_setaffinity(0, {int(core)})


def _limit_all(limits: str, *, user_wide: bool) -> None:
    for entry in limits.split(","):
        name, _, value = entry.partition("=")
        taken = _num_tasks_of_user() if name == "RLIMIT_NPROC" and user_wide else 0
        # At the soft limit of time the kernel sends a signal of its own, which tells the parent why the program ended.
        _limit(getattr(resource, name), int(value) + taken, further=1 if name == "RLIMIT_CPU" else 0)


def _limit(which: int, soft: int, *, further: int) -> None:
    most = resource.getrlimit(which)[1]
    soft, hard = (value if most == resource.RLIM_INFINITY else min(value, most) for value in (soft, soft + further))
    resource.setrlimit(which, (soft, hard))


def _num_tasks_of_user() -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _stay_as_reaper() -> None:
    """Fork: the child goes on, and this process, the first of its namespace, waits and takes the rest with it."""
    program = os.fork()
    if program == 0:
        return
    os.closerange(0, 256)
    while True:
        ended, status = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _enter_root(text: str) -> None:
    """Make a root file system of the ``mounts`` at ``at``, and leave the machine's; only after ``refuse_outside``."""
    import ctypes
    import json

    libc = load_libc()
    root = json.loads(text)
    at = root["at"]
    make_private()
    mount_tmpfs(at, "mode=755,size=1m")
    for mount in root["mounts"]:
        _make_mount(mount, at + mount["at"])
    for name in ("null", "zero", "full", "random", "urandom"):
        device = f"{at}/dev/{name}"
        os.close(os.open(device, os.O_CREAT | os.O_WRONLY))
        _mount(f"/dev/{name}", device, None, _MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{at}/dev/{name}")
    os.symlink("/proc/self/fd", f"{at}/dev/fd")
    os.mkdir(f"{at}/proc", 0o755)
    _mount("proc", f"{at}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.mkdir(f"{at}/.old", 0o755)
    if libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], at.encode(), f"{at}/.old".encode()) != 0:
        raise OSError(ctypes.get_errno(), "pivot_root failed")
    os.chdir("/")
    if libc.umount2(b"/.old", _MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), "cannot leave the machine's root")
    os.rmdir("/.old")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _make_mount(mount: dict[str, Any], target: str) -> None:
    kind = mount["kind"]
    if kind == "symlink":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(mount["source"], target)
        return
    if kind != "file":
        os.makedirs(target, exist_ok=True)
    if kind == "tmpfs":
        mount_tmpfs(target, f"mode={mount['mode']},size={mount['size']},nr_inodes={mount['num_files'] + 1}")
        return
    if kind == "file":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(mount["source"], target, None, _MS_BIND)
    if not mount["writable"]:
        # Flags that the source has may not be taken away inside a user namespace.
        had = os.statvfs(target).f_flag
        kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if had & bit)
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)


def make_private() -> None:
    """Have mounts of this namespace seen nowhere else, and none of others here. Raises OSError."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def mount_tmpfs(target: str, options: str, *, again: bool = False) -> None:
    """Mount a file system in memory, or bound the one that is there ``again``. Raises OSError."""
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV | (_MS_REMOUNT if again else 0), options)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    import ctypes

    libc = load_libc()
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    if libc.mount(*texts, ctypes.c_ulong(flags), None if options is None else options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount on {target} failed: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    try:
        launch(*sys.argv[1:])
    except Exception as error:  # whatever it is, the parent is told, and does not take it for the program's failure
        os.write(int(sys.argv[1]), f"failed: {type(error).__name__}: {error}".encode()[:2000])
        os._exit(125)
