"""The end of a server in one line: its exit code, what its log says of it, and what to do."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

from rollfeed.engine.launch.keeper import NOT_STARTED

_LOOKED_AT_BYTES = 1 << 18
_LONGEST = 300
_CAUSE = re.compile(r"\b(?:[A-Z]\w*(?:Error|Exception)|error): .*\S")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REMEDIES = (
    (r"unrecognized arguments|invalid choice|error: argument|expected one argument", "correct engine.launch.flags"),
    (r"address already in use|Errno 98", "another program has the port: leave out engine.launch.port"),
    (
        r"out of memory|No available memory|KV cache",
        "give it memory: lower engine.context_length, or set gpu-memory-utilization (vLLM) or mem-fraction-static "
        "(SGLang) in engine.launch.flags",
    ),
    (r"No module named|No such file", "set engine.launch.command to a program that has it"),
    (r"invalid device ordinal|No CUDA GPUs|CUDA_VISIBLE_DEVICES", "correct engine.launch.gpus"),
)


def explained(log: Path, start: int, code: int | None) -> str:
    """Return how a server has ended, after ``it ended``: a code, the cause that its log names, and a remedy.

    Args:
        log: What it wrote.
        start: Bytes of the file that were written before its last start.
        code: Exit code of its keeper; None where it did not end by itself.
    """
    ended = "" if code is None else f"{_code_text(code)}; "
    text = _COLOURS.sub("", _since(log, start))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [found.group()[:_LONGEST] for line in lines if (found := _CAUSE.search(line))]
    told = list(dict.fromkeys([*causes[:1], *[line[:_LONGEST] for line in lines[-1:]]]))
    shown = " | ".join(told) or "nothing"
    remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, shown, re.IGNORECASE)), "look there")
    return f"{ended}{log} ends with: {shown}; {remedy}"


def _code_text(code: int) -> str:
    names = {each.value: each.name for each in signal.Signals}
    if code == NOT_STARTED:
        return "before it began"
    if (number := -code if code < 0 else code - 128) in names:
        return f"by signal {names[number]}"
    return f"with exit code {code}"


def _since(log: Path, start: int) -> str:
    with suppress(OSError), log.open("rb") as written:
        end = written.seek(0, 2)
        written.seek(max(start, end - _LOOKED_AT_BYTES))
        return written.read().decode(errors="replace")
    return ""
