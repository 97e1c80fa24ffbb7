"""A program that does not compute the answer earns nothing, whatever it does to seem to."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollfeed.rewards.code.grader import CodeGrader
from rollfeed.types import Correct, Outcome

ANSWERS = ("79190841", "10472935")
"""Which no program can know or guess."""
PRINTED = json.dumps({"inputs": ["alpha\n", "beta\n"], "outputs": [f"{answer}\n" for answer in ANSWERS]})
RETURNED = json.dumps({"inputs": ['"alpha"', '"beta"'], "outputs": list(ANSWERS), "fn_name": "answer"})

FIND = """
import os, re
def told(text):
    for found in re.findall(r"(?:7919|1047)[0-9]{4}", text):
        print(found, flush=True); os._exit(0)
def read(path):
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        told(os.read(file, 1 << 22).decode(errors="replace"))
        os.close(file)
    except OSError:
        pass
"""
"""Does print an answer that it comes across."""

PRINTING = {
    "exits_at_once": "raise SystemExit",
    "exits_without_cleaning_up": "import os; os._exit(0)",
    "exits_in_a_hook": "import os, sys; sys.excepthook = lambda *what: os._exit(0); 1 / 0",
    "exits_by_a_signal_it_takes": (
        "import os, signal; signal.signal(15, lambda *what: os._exit(0)); os.kill(os.getpid(), 15)"
    ),
    "becomes_true": "import os; os.execv('/bin/true', ['true'])",
    "says_that_it_passed": "print('passed\\nOK\\nAll tests passed\\nTrue\\n1')",
    "says_a_verdict": 'print(\'{"reward": 1.0, "correct": true, "outcome": "ok", "passed": true}\')',
    "says_nan_and_inf": "print('nan')",
    "says_many_answers": "print(*range(79190000, 79191000), sep='\\n')",
    "says_all_on_one_line": "print(*range(79190000, 79191000))",
    "takes_back_what_it_said": "print('1\\b\\r\\x1b[2K\\x1b[1A\\0', end='')",
    "prints_at_exit": "import atexit; atexit.register(lambda: print('passed'))",
    "prints_from_a_child": "import os\nif os.fork(): os._exit(0)\nprint('passed')",
    "prints_from_a_thread": "import threading; threading.Timer(0.05, lambda: print('passed')).start()",
    "stays_behind": (
        "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(0.2)"
    ),
    "says_that_it_started": (
        "import os\nfor number in range(3, 256):\n    try: os.write(number, b'started')\n    except OSError: pass"
    ),
    "writes_to_all_descriptors": (
        "import os\nfor number in range(1, 256):\n    try: os.write(number, b'1.0\\n')\n    except OSError: pass"
    ),
    "writes_to_all_processes": (
        "import glob\nfor path in glob.glob('/proc/[0-9]*/fd/[0-9]*'):\n    try: open(path, 'w').write('1.0\\n')\n"
        "    except OSError: pass"
    ),
    "kills_all": "import os\nfor pid in (os.getppid(), 1, -1):\n    try: os.kill(pid, 9)\n    except OSError: pass",
    "stops_its_parent": "import os\ntry: os.kill(os.getppid(), 19)\nexcept OSError: pass",
    "rewrites_the_runner": "open('runner.py', 'w').write('print(79190841)')",
    "rewrites_itself": "open('solution.py', 'w').write('print(79190841)')",
    "plants_modules": (
        "for name in ('json', 'sitecustomize', 'usercustomize', 're'):\n    open(name + '.py', 'w').write('x = 1')"
    ),
    "plants_links": "import os\nos.unlink('solution.py'); os.symlink('/proc/self/fd/0', 'solution.py')",
    "reads_environments": FIND + "import glob\nfor path in glob.glob('/proc/[0-9]*/environ'): read(path)",
    "reads_command_lines": FIND + "import glob\nfor path in glob.glob('/proc/[0-9]*/cmdline'): read(path)",
    "reads_descriptors": FIND + "import glob\nfor path in glob.glob('/proc/[0-9]*/fd/*'): read(path)",
    "reads_files": (
        FIND + "for top in ('/box', '/tmp', '/home', '/root', '/dev/shm', '/work', '/run'):\n"
        "    for folder, _, names in os.walk(top):\n        for name in names: read(f'{folder}/{name}')"
    ),
    "reads_the_runners_objects": (
        FIND + "import gc, sys\nframe = sys._getframe()\nwhile frame:\n"
        "    told(repr(frame.f_globals)); frame = frame.f_back\n"
        "told(' '.join(each for each in gc.get_objects() if isinstance(each, str)))"
    ),
    "reads_its_own_memory": (
        FIND + "hidden = bytes([55, 57, 49, 57, 48, 56, 52, 50])\nmost = 1 << 26\n"
        "for line in open('/proc/self/maps'):\n    begin, end = (int(at, 16) for at in line.split()[0].split('-'))\n"
        "    if '[stack]' in line or '[heap]' in line:\n        with open('/proc/self/mem', 'rb') as memory:\n"
        "            memory.seek(begin); content = memory.read(min(end - begin, most))\n"
        "        print(content.count(hidden))"
    ),
    "reads_its_parents_memory": FIND + "for pid in {os.getppid(), 1} - {os.getpid()}: read(f'/proc/{pid}/mem')",
}
RETURNING = {
    "equals_everything": "class E:\n    def __eq__(self, other): return True\ndef answer(x): return E()",
    "is_any": "from unittest import mock\ndef answer(x): return mock.ANY",
    "is_a_number_that_equals_everything": (
        "class E(int):\n    def __eq__(self, other): return True\ndef answer(x): return E(1)"
    ),
    "is_a_text_that_equals_everything": (
        "class E(str):\n    def __eq__(self, other): return True\ndef answer(x): return E()"
    ),
    "claims_to_be_a_number": (
        "class E:\n    __class__ = int\n    def __index__(self): return 1\ndef answer(x): return E()"
    ),
    "is_true": "def answer(x): return True",
    "is_nan": "def answer(x): return float('nan')",
    "never_ends": "import itertools\ndef answer(x): return itertools.count()",
    "replaces_what_writes": "import json\njson.dumps = lambda *what, **named: 'true'\ndef answer(x): return 1",
    "replaces_what_checks": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals['plain'] = lambda value: True\n"
        "    frame = frame.f_back\ndef answer(x): return 1"
    ),
    "writes_its_own_verdict": (
        "import os\ndef answer(x):\n    for number in range(1, 64):\n        try: os.write(number, b'true')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
}


@pytest.mark.parametrize("way", PRINTING)
async def test_x26_a_program_that_only_seems_to_print_the_answer_earns_nothing(way: str, grader: CodeGrader) -> None:
    await earns_nothing(PRINTING[way], PRINTED, grader)


@pytest.mark.parametrize("way", RETURNING)
async def test_x26_a_program_that_only_seems_to_return_the_answer_earns_nothing(way: str, grader: CodeGrader) -> None:
    await earns_nothing(RETURNING[way], RETURNED, grader)


async def earns_nothing(program: str, label: str, grader: CodeGrader) -> None:
    verdict = await grader(f"```python\n{program}\n```", label, {})
    assert (verdict.outcome, verdict.reward, verdict.correct) == (Outcome.OK, 0.0, Correct.NO), verdict.detail
    assert verdict.detail.startswith("test ")


async def test_x26_an_honest_program_beside_them_earns_its_reward(grader: CodeGrader) -> None:
    honest = f"```python\nprint({dict(zip(('alpha', 'beta'), map(int, ANSWERS), strict=True))}[input()])\n```"
    hostile = ("kills_all", "stays_behind", "writes_to_all_processes", "plants_modules")
    verdicts = await asyncio.gather(
        *(grader(f"```python\n{PRINTING[way]}\n```", PRINTED, {}) for way in hostile), grader(honest, PRINTED, {})
    )
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 0.0, 0.0, 1.0]
