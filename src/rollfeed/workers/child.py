"""Serves calls inside a worker process; imports the standard library only, so that it starts quickly.

Requests and replies are frames on one inherited socket: four bytes of length, then a JSON header line, then
JSON. Standard output and error belong to the called functions; what they print is not read here. The process ends when
the socket closes, and the kernel kills it when the parent dies.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_FRAME_BYTES = 64 * 1024 * 1024
_PR_SET_PDEATHSIG = 1
_CPU_MARGIN_SECONDS = 2.0
_PAGE_BYTES = resource.getpagesize()

Reply = tuple[str, str]
"""Status (``ok``, ``raised`` or ``memory``) and JSON."""


def main() -> None:
    """Serve calls until the parent closes the socket; arguments are the socket's number and the parent's id."""
    channel, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    # A line is written at once: it is there when the process is killed, and those of other workers stay beside it.
    printed: Any = sys.stdout
    printed.reconfigure(line_buffering=True, write_through=False)
    connection = socket.socket(fileno=channel)
    with connection, connection.makefile("rb") as requests:
        functions: dict[str, Callable[..., Any]] = {}
        while (frame := _read(requests)) is not None:
            header, _, body = frame.partition(b"\n")
            status, text = _serve(json.loads(header), body, functions)
            with contextlib.suppress(OSError, ValueError):
                printed.flush()
            _write(connection, status, text)


def _serve(header: dict[str, Any], body: bytes, functions: dict[str, Callable[..., Any]]) -> Reply:
    _limit_cpu(header["seconds"] * header["threads"])
    if header["do"] == "start":
        return _guarded(lambda: _start(json.loads(body)))
    path = header["function"]
    if header["do"] == "load":
        return _guarded(lambda: functions.update({path: _find(path)}))
    return _guarded(lambda: _call(functions[path], json.loads(body)))


def _start(settings: dict[str, Any]) -> None:
    sys.path[:] = settings["sys_path"]
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_CORE):
        value = settings["memory_limit_bytes"] if limit == resource.RLIMIT_AS else 0
        if value is None:
            continue
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    for module in settings["warm_up"]:
        importlib.import_module(module)
    if settings["log"] is not None:
        from rollfeed.logs import log_in_worker  # as sys.path is the parent's by now

        log_in_worker(settings["log"])


def _guarded(action: Callable[[], Any]) -> Reply:
    try:
        result = action()
        text = json.dumps(result)
    except MemoryError:
        return "memory", json.dumps("MemoryError: the worker's memory limit")
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a function are its failure, not the worker's
        # Here, as calls that do not fail need not wait for its import.
        from rollfeed.faults import describe

        return "raised", json.dumps(describe(error))
    if len(text) > MAX_FRAME_BYTES:
        return "raised", json.dumps(f"the result is larger than {MAX_FRAME_BYTES} bytes")
    return "ok", text


def _call(function: Callable[..., Any], args: list[Any]) -> Any:
    result = function(*args)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("async functions cannot be called in a worker")
    return _to_builtins(result)


def _find(path: str) -> Callable[..., Any]:
    # Here, as sys.path is the parent's by now.
    from rollfeed.base.importing import find_function

    return find_function(path)


def _to_builtins(result: Any) -> Any:
    if hasattr(result, "__dataclass_fields__") or hasattr(result, "__struct_fields__"):
        import msgspec

        return msgspec.to_builtins(result)
    return result


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end the work when the parent, which holds the deadline, cannot."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime + seconds + _CPU_MARGIN_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _die_with(parent: int) -> None:
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("!I", head)
    frame = stream.read(length)
    return frame if len(frame) == length else None


def _write(connection: socket.socket, status: str, text: str) -> None:
    frame = f'{{"status":"{status}","resident_bytes":{_resident_bytes()}}}\n{text}'.encode()
    connection.sendall(struct.pack("!I", len(frame)) + frame)


if __name__ == "__main__":
    main()
