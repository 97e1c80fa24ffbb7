"""What a command prints never ends it; each case is a process of its own, as the streams are the process's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

PROGRAM = """
import sys
from rollfeed.cli.output import close_output, open_output
open_output()
print("caf\\u00e9 \\u4f60 \\ud83d")
print("told \\u4f60", file=sys.stderr)
{more}
sys.stdout.flush()
problem = close_output()
sys.exit(f"lost: {{problem}}" if problem else 7)
"""


def run(
    more: str = "", *, encoding: str = "utf-8", closed: int | None = None, **streams: Any
) -> subprocess.CompletedProcess[bytes]:
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    shell = [] if closed is None else ["sh", "-c", f'exec "$@" {closed}>&-', "sh"]
    return subprocess.run(
        [*shell, sys.executable, "-c", PROGRAM.format(more=more)],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
        **settings,
    )


def test_what_an_encoding_does_not_have_is_an_escape() -> None:
    result = run(encoding="ascii")
    assert (result.returncode, result.stdout) == (7, b"caf\\xe9 \\u4f60 \\ud83d\n")
    assert result.stderr == b"told \\u4f60\n"
    assert run(encoding="latin-1").stdout == b"caf\xe9 \\u4f60 \\ud83d\n"
    assert run().stdout == "caf\u00e9 \u4f60 \\ud83d\n".encode()


def test_a_reader_that_has_gone_ends_nothing() -> None:
    for stream in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            result = run("for n in range(100_000): print(n); print(n, file=sys.stderr)", **{stream: writer})
        finally:
            os.close(writer)
        assert result.returncode == 7


def test_a_closed_stream_ends_nothing_and_no_file_takes_its_place() -> None:
    more = "file = open(sys.executable); assert file.fileno() > 2, file.fileno()"
    for descriptor in (1, 2):
        result = run(more, closed=descriptor)
        assert (result.returncode, result.stderr if descriptor == 1 else b"") in ((7, b"told \xe4\xbd\xa0\n"), (7, b""))


def test_a_full_disk_is_told_at_the_end() -> None:
    with open("/dev/full", "wb") as full:
        result = run(stdout=full)
    assert result.returncode == 1
    assert result.stderr.endswith(b"lost: No space left on device\n")
