"""Programs as models write them, well and badly, graded as ``rollfeed score`` grades them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app import grade_rows
from rollfeed.config import CodeRewardSettings, RewardSettings

CANARY = f"/tmp/rollfeed-variant-{os.getpid()}"
SECRET = "ROLLFEED_VARIANT_SECRET"
SUM = {"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6\n"]}
TWICE = {"inputs": ["4", "9"], "outputs": ["8", "18"], "fn_name": "twice"}
ADD = "a, b = map(int, input().split())\n"
SOLVED = ADD + "print(a + b)\n"


def answer(inputs: list[Any], outputs: list[Any], function: str | None = None) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs} | ({"fn_name": function} if function else {})


def fenced(program: str, language: str = "python") -> str:
    return f"Here is my solution.\n```{language}\n{program}\n```\nDone."


RIGHT: dict[str, tuple[str, Any]] = {
    "input in a loop until it ends": (
        "total = 0\ntry:\n    while True: total += int(input())\nexcept EOFError:\n    print(total)",
        answer(["1\n2\n3\n", ""], ["6", "0"]),
    ),
    "input as often as the first line says": (
        "for _ in range(int(input())):\n    print(sum(map(int, input().split())))",
        answer(["2\n1 2\n3 4", "1\n5 5\n"], ["3\n7\n", "10"]),
    ),
    "sys.stdin.read": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", SUM),
    "sys.stdin.buffer": ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", SUM),
    "sys.stdin as lines": ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))", SUM),
    "input replaced by readline": ("import sys\ninput = sys.stdin.readline\n" + SOLVED, SUM),
    "open(0)": ("print(sum(map(int, open(0).read().split())))", SUM),
    "/dev/stdin": ("print(sum(map(int, open('/dev/stdin').read().split())))", SUM),
    "standard input made from a file": ("import sys\nsys.stdin = open('/dev/stdin')\n" + SOLVED, SUM),
    "os.read": ("import os\nprint(sum(map(int, os.read(0, 100).split())))", SUM),
    "sys.stdout.write": ("import sys\n" + ADD + "sys.stdout.write(str(a + b))", SUM),
    "main guard": (
        "def main():\n    " + SOLVED.replace("\n", "\n    ") + "\nif __name__ == '__main__':\n    main()",
        SUM,
    ),
    "class with a main method": (
        f"class Main:\n    def run(self):\n        {ADD}        print(a + b)\nif __name__ == '__main__': Main().run()",
        SUM,
    ),
    "sys.exit in main": (SOLVED + "import sys\nsys.exit()", SUM),
    "sys.exit with 0 in a function": (
        "import sys\ndef main():\n    " + ADD + "    print(a + b)\n    sys.exit(0)\nmain()",
        SUM,
    ),
    "exit without import": (SOLVED + "exit(0)", SUM),
    "quit": (SOLVED + "quit()", SUM),
    "raise SystemExit": (SOLVED + "raise SystemExit", SUM),
    "os._exit after a flush": ("import os\n" + ADD + "print(a + b, flush=True)\nos._exit(0)", SUM),
    "noise on standard error": ("import sys\nprint('debug', file=sys.stderr)\n" + SOLVED, SUM),
    "a warning": ("import warnings\nwarnings.warn('careful')\n" + SOLVED, SUM),
    "closed standard output": (SOLVED + "import sys\nsys.stdout.close()", SUM),
    "imports left out": (ADD + "print(Counter([a + b]).most_common(1)[0][0])", SUM),
    "typing names left out": (
        "def f(xs: List[int]) -> Optional[int]: return sum(xs)\nprint(f(map(int, input().split())))",
        SUM,
    ),
    "imports that are there": ("from collections import *\nfrom math import gcd\nimport heapq, bisect\n" + SOLVED, SUM),
    "future import": ("from __future__ import annotations\n" + SOLVED, SUM),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n" + ADD + "print(P(a + b).x)",
        SUM,
    ),
    "recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))", answer(["9000"], ["9000"])),
    "recursion with its own limit": (
        "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(100000))",
        answer([""], ["100000"]),
    ),
    "recursion of a cached function": (
        "import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10 ** 6)\n@lru_cache(None)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))",
        answer(["30000"], ["30000"]),
    ),
    "recursion in a thread with a large stack": (
        "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 27)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(90000)))\nt.start()\nt.join()",
        answer([""], ["90000"]),
    ),
    "endless recursion that is caught": (
        "from functools import cache\n@cache\ndef f(n): return f(n + 1)\ntry: f(0)\n"
        "except RecursionError: print('deep')",
        answer([""], ["deep"]),
    ),
    "a daemon thread left running": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n" + SOLVED,
        SUM,
    ),
    "a thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: print(sum(pool.map(int, input().split())))",
        SUM,
    ),
    "a huge integer": ("print(int(input()) + 1)", answer(["9" * 6_000], ["1" + "0" * 6_000])),
    "a large output": ("print(*range(100000))", answer([""], [" ".join(map(str, range(100_000)))])),
    "its own file": ("open('x', 'w').write(input())\nprint(sum(map(int, open('x').read().split())))", SUM),
    "a folder made in each test": ("import os\nos.mkdir('x')\n" + SOLVED, SUM),
    "its folder closed": (SOLVED + "import os\nos.chmod('.', 0)", SUM),
    "its files deleted": ("import os\n" + SOLVED + "for name in os.listdir('.'): os.unlink(name)", SUM),
    "trailing blanks, no last newline": (ADD + "print(a + b, end='  ')", SUM),
    "lines that end in CR LF": (ADD + "print(a + b, end='\\r\\n\\r\\n')", SUM),
    "expected lines end in CR LF": ("print(1)\nprint(2)", answer([""], ["1\r\n2\r\n"])),
    "blank lines around": (ADD + "print()\nprint('', a + b)\nprint()", SUM),
    "float rounded otherwise": ("print(2 / 3)", answer([""], ["0.666666667"])),
    "float in scientific notation": ("print(1e-05 * float(input()))", answer(["2"], ["0.00002"])),
    "float where an integer is expected": (ADD + "print(float(a + b))", SUM),
    "one number of many differs within the tolerance": ("print('x', 0.1 + 0.2, 7)", answer([""], ["x 0.3 7"])),
    "nothing to print": ("input()", answer(["x"], [""])),
    "Unicode": ("print(input()[::-1])", answer(["h\u00e9\U0001f600"], ["\U0001f600\u00e9h"])),
    "Windows lines and a byte order mark": ("\ufeff" + SOLVED.replace("\n", "\r\n"), SUM),
    "tabs": ("def f():\n\t" + ADD + "\treturn a + b\nprint(f())", SUM),
    "inputs as lists of lines": (SOLVED, answer([["2 3"], ["10 -4"]], [["5"], ["6"]])),
    "numbers as outputs": (SOLVED, answer(["2 3"], [5])),
    "function": ("def twice(x): return 2 * x", TWICE),
    "method of Solution": ("class Solution:\n    def twice(self, x: int) -> int:\n        return 2 * x", TWICE),
    "static method of Solution": ("class Solution:\n    @staticmethod\n    def twice(x): return 2 * x", TWICE),
    "Solution with a helper and a state": (
        "class Solution:\n    def __init__(self): self.k = 2\n    def help(self, x): return self.k * x\n"
        "    def twice(self, x: int) -> int: return self.help(x)",
        TWICE,
    ),
    "Solution with a function beside it": (
        "def help(x): return 2 * x\nclass Solution:\n    def twice(self, x): return help(x)",
        TWICE,
    ),
    "function that prints": ("def twice(x):\n    print('debug', x)\n    return 2 * x", TWICE),
    "function with a main guard that reads": (
        "def twice(x): return 2 * x\nif __name__ == '__main__':\n    print(twice(int(input())))",
        TWICE,
    ),
    "lambda": ("twice = lambda x: 2 * x", TWICE),
    "decorated": ("from functools import lru_cache\n@lru_cache(None)\ndef twice(x): return x * 2", TWICE),
    "tuple for a list": ("def f(a, b): return (b, a)", answer(["1\n2"], ["[2, 1]"], "f")),
    "arguments as a list": ("def f(a, b): return a - b", answer([[3, 1]], [2], "f")),
    "lists, texts, null and truth": (
        "def f(xs, s, none, flag): return [xs[::-1], s + '!', none, not flag]",
        answer(['[1, 2]\n"a"\nnull\ntrue'], ['[[2, 1], "a!", null, false]'], "f"),
    ),
    "result of another number type": (
        "import fractions\nclass Solution:\n    def f(self, x): return float(fractions.Fraction(x, 3))",
        answer(["1"], ["0.33333"], "f") | {"outputs": ["0.3333333"]},
    ),
    "recursive function called": (
        "class Solution:\n    def f(self, n): return 0 if n == 0 else 1 + self.f(n - 1)",
        answer(["5000"], ["5000"], "f"),
    ),
}

WRONG: dict[str, tuple[str, Any]] = {
    "another case": ("print('YES')", answer([""], ["Yes"])),
    "words run together": ("print('12')", answer([""], ["1 2"])),
    "a line missing": ("print(1)", answer([""], ["1\n2"])),
    "lines in another order": ("print(2)\nprint(1)", answer([""], ["1\n2"])),
    "float beyond the tolerance": ("print(0.667)", answer([""], ["0.666666667"])),
    "not a number for a number": ("print(float('nan'))", answer([""], ["1.5"])),
    "large integers that are one apart": ("print(10 ** 20 + 1)", answer([""], [str(10**20)])),
    "only the last test fails": ("a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)", SUM),
    "output on standard error": ("import sys\n" + ADD + "print(a + b, file=sys.stderr)", SUM),
    "output never flushed": ("import os\n" + ADD + "print(a + b)\nos._exit(0)", SUM),
    "exit code 1 after the right output": (SOLVED + "raise SystemExit(1)", SUM),
    "exit with a message": (SOLVED + "import sys\nsys.exit('done')", SUM),
    "exception after the right output": (SOLVED + "[][0]", SUM),
    "killed after the right output": (SOLVED + "import os, sys\nsys.stdout.flush()\nos.kill(os.getpid(), 9)", SUM),
    "a thread left running": (
        SOLVED + "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
        SUM,
    ),
    "standard output closed before": ("import os\nos.close(1)\n" + SOLVED, SUM),
    "waits for more input for ever": (SOLVED + "import time\ntime.sleep(600)", SUM),
    "endless loop that ignores signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass",
        SUM,
    ),
    "syntax error": ("print('a'", SUM),
    "asks for more input than there is": (ADD + "input()\nprint(a + b)", SUM),
    "method that is not there": ("class Solution:\n    def thrice(self, x): return 3 * x", TWICE),
    "too many arguments": ("def twice(x, y): return 2 * x", TWICE),
    "prints instead of returning": ("def twice(x): print(2 * x)", TWICE),
    "text for a number": ("def twice(x): return str(2 * x)", TWICE),
    "equal to everything": (
        "class E(float):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef twice(x): return E(0)",
        TWICE,
    ),
    "a generator": ("def twice(x): yield 2 * x", TWICE),
    "not JSON by a way round": ("import os\ndef twice(x):\n    os.write(1, b'8')\n    os._exit(0)", TWICE),
    "endless nesting": ("def twice(x):\n    xs = []\n    xs.append(xs)\n    return xs", TWICE),
    "json replaced": (
        "import json\njson.dumps = lambda *a, **k: '8'\njson.loads = lambda *a, **k: [4]\ndef twice(x): return 8",
        TWICE,
    ),
    "the runner's comparison looked for": (
        "import gc, sys\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o]\n"
        "print(found[0]['outputs'][0] if found else 'nothing')",
        SUM,
    ),
    "frames of the runner read": (
        "import sys\nframe, text = sys._getframe(), ''\nwhile frame:\n    text += str(frame.f_locals)\n"
        "    frame = frame.f_back\n"
        "print('seen' * ('expec' + 'ted-7f' in text) + input())",
        answer(["x"], ["seen"]),
    ),
    "the expected output looked for in /proc and the files": (
        "import os\ntext = ''\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for name in ('cmdline', 'environ', 'fd/0', 'fd/3'):\n"
        "        try: text += open(f'/proc/{pid}/{name}', errors='replace').read()\n        except OSError: pass\n"
        "for folder, _, names in os.walk('/box'):\n    for name in names: text += open(f'{folder}/{name}').read()\n"
        "print('expec' + 'ted-7f' if 'expec' + 'ted-7f' in text else 'nothing')",
        answer(["x"], ["expected-7f"]),
    ),
    "the cases' file looked for": (f"print(open({str(Path(__file__).resolve())!r}).read()[:0] + '5')", SUM),
    "the environment read": (f"import os\nprint(os.environ['{SECRET}'])", answer([""], ["sesame"])),
    "the parent's environment read": (
        "import os\nprint(open(f'/proc/{os.getppid()}/environ').read().partition('SECRET=')[2].split(chr(0))[0])",
        answer([""], ["sesame"]),
    ),
    "written outside": (f"open('{CANARY}', 'w').write('x')\nprint('written')", SUM),
    "written outside by a link": (f"import os\nos.symlink('{CANARY}', 'link')\nopen('link', 'w').write('x')", SUM),
    "a shell started": (f"import os\nos.system('echo x > {CANARY}')\nprint(open('{CANARY}').read())", SUM),
    "the parent killed": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)", SUM),
    "all process numbers killed": (
        "import os, signal\nfor pid in range(1, 40000):\n    if pid != os.getpid():\n"
        "        try: os.kill(pid, signal.SIGKILL)\n"
        "        except OSError: pass",
        SUM,
    ),
    "the internet": (
        "import urllib.request\nprint(urllib.request.urlopen('http://192.0.2.1/', timeout=1).read())",
        SUM,
    ),
    "memory in many pieces": ("xs = []\nwhile True: xs.append(bytearray(1 << 24))", SUM),
    "memory by an exponent": ("print(len('x' * 10 ** 12))", answer([""], [str(10**12)])),
    "memory in children": (
        "import os, signal\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(b'x' * (300 << 20))\n"
        "        signal.pause()\n"
        "signal.pause()",
        SUM,
    ),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", SUM),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
        SUM,
    ),
    "output flood": ("while True: print('y' * 10000)", SUM),
    "output flood on standard error": ("import sys\nwhile True: print('y' * 10000, file=sys.stderr)", SUM),
    "output flood after the right output": (SOLVED + "while True: print()", SUM),
    "file flood": ("n = 0\nwhile True:\n    n += 1\n    open(str(n), 'w').write('y' * 100000)", SUM),
    "folders without end": ("import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')", SUM),
    "crash of the interpreter": ("import ctypes\nctypes.string_at(0)", SUM),
}

# Whatever the verdict, it has to be a verdict, come in time and leave nothing.
EITHER: dict[str, tuple[str, Any]] = {
    "folders of long names": (
        SOLVED + "import os\nfor _ in range(30):\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)",
        SUM,
    ),
    "a child left running": (SOLVED + "import os, time\nif os.fork() == 0: time.sleep(600)", SUM),
    "a child that left its session": (
        SOLVED + "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)",
        SUM,
    ),
    "zombie children": ("import os\nfor _ in range(5):\n    if os.fork() == 0: os._exit(0)\n" + SOLVED, SUM),
    "a child that holds the output": (SOLVED + "import subprocess\nsubprocess.Popen(['sleep', '600'])", SUM),
}

WITHOUT_PROGRAM = {
    "no fence": SOLVED,
    "indented and no fence": "    " + SOLVED.replace("\n", "\n    "),
    "a fence that never ends": f"```python\n{SOLVED}",
    "another language": fenced(SOLVED, "cpp"),
    "an empty fence": "```python\n```",
    "a good fence and one that never ends": f"```python\n{SOLVED}\n```\nBetter:\n```python\n{SOLVED}",
    "only in the reasoning": f"<think>\n```python\n{SOLVED}\n```\n</think>\nIt is done.",
    "reasoning that never ends": f"<think>\n```python\n{SOLVED}\n```",
    "code in a line": "Use `print(sum(map(int, input().split())))`.",
    "nothing": "",
}
WITH_PROGRAM = {
    "no language": fenced(SOLVED, ""),
    "py": fenced(SOLVED, "py"),
    "Python3": fenced(SOLVED, "Python3"),
    "tildes": f"~~~python\n{SOLVED}\n~~~",
    "four ticks": f"````python\n{SOLVED}\n````",
    "in a list": "1. So:\n\n   ```python\n   " + SOLVED.replace("\n", "\n   ") + "\n   ```\n",
    "the last of two": fenced("print(0)") + fenced(SOLVED),
    "then its output": fenced(SOLVED) + "\nIt prints\n```text\n5\n```",
    "then another language": fenced(SOLVED) + "\nIn C++:\n" + fenced("int main() {}", "cpp"),
    "reasoning before": "<think>\n```python\nprint(0)\n```\n</think>\n" + fenced(SOLVED),
    "reasoning that opened a fence": "<think>\n```python\nprint(0)\n</think>\n" + fenced(SOLVED),
    "Windows lines": fenced(SOLVED).replace("\n", "\r\n"),
    "prose after the opening fence's language": fenced(SOLVED, "python solution.py"),
}

VARIANTS: list[tuple[str, str, Any, float | None]] = [
    *((f"right: {name}", fenced(program), tests, 1.0) for name, (program, tests) in RIGHT.items()),
    *((f"wrong: {name}", fenced(program), tests, 0.0) for name, (program, tests) in WRONG.items()),
    *((f"either: {name}", fenced(program), tests, None) for name, (program, tests) in EITHER.items()),
    *((f"no program: {name}", response, SUM, 0.0) for name, response in WITHOUT_PROGRAM.items()),
    *((f"program: {name}", response, SUM, 1.0) for name, response in WITH_PROGRAM.items()),
]


def own_children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@pytest.fixture(scope="module")
def children_before() -> set[int]:
    return own_children()


@pytest.fixture(scope="module")
def verdicts(children_before: set[int]) -> Iterator[dict[str, dict[str, Any]]]:
    """Grade them all at once, since finding out the isolation takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "sesame")
        rows = [
            {"id": name, "rm_type": "livecodebench", "response": response, "label": json.dumps(tests)}
            for name, response, tests, _ in VARIANTS
        ]
        hurried = RewardSettings(code=CodeRewardSettings(test_timeout_seconds=3.0))

        async def grade() -> dict[str, dict[str, Any]]:
            right = grade_rows([row for row, (*_, reward) in zip(rows, VARIANTS, strict=True) if reward == 1.0])
            rest = grade_rows([row for row, (*_, reward) in zip(rows, VARIANTS, strict=True) if reward != 1.0], hurried)
            return {result["id"]: result for results in (right, rest) async for result in results}

        yield asyncio.run(grade())


@pytest.mark.parametrize(("name", "reward"), [(name, reward) for name, _, _, reward in VARIANTS])
def test_program_gets_its_reward(name: str, reward: float | None, verdicts: dict[str, dict[str, Any]]) -> None:
    verdict = verdicts[name]
    assert verdict["outcome"] == "ok", verdict["detail"]
    assert verdict["reward"] in ([0.0, 1.0] if reward is None else [reward]), verdict["detail"]


def test_nothing_is_left_of_all_these_programs(verdicts: dict[str, dict[str, Any]], children_before: set[int]) -> None:
    assert not Path(CANARY).exists()
    assert own_children() <= children_before


async def grade_one(program: str, tests: Any, **code: Any) -> dict[str, Any]:
    row = {"rm_type": "livecodebench", "response": fenced(program), "label": tests}
    async for result in grade_rows([row], RewardSettings(code=CodeRewardSettings(**code))):
        return result
    raise AssertionError


async def test_server_of_this_machine_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\nprint(5)"
        result = await grade_one(program, answer([""], ["5"]))
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (result["reward"], result["outcome"]) == (0.0, "ok")


async def test_time_limit_is_for_each_test_and_not_for_all() -> None:
    program = "import time\ntime.sleep(0.6)\nprint(input())"
    tests = answer(["1", "2", "3"], ["1", "2", "3"])
    assert (await grade_one(program, tests, test_timeout_seconds=1.5))["reward"] == 1.0
    late = await grade_one("import time\ntime.sleep(600)", tests, test_timeout_seconds=1.0)
    assert (late["reward"], late["detail"]) == (0.0, "test 1 of 3: not done within 1 s")


async def test_time_limit_of_all_tests_together_is_a_timeout_and_no_reward() -> None:
    result = await grade_one("while True: pass", answer(["1"], ["1"]), test_timeout_seconds=60.0, timeout_seconds=0.7)
    assert (result["reward"], result["outcome"]) == (None, "timeout")


async def test_results_of_numpy_are_numbers_and_lists() -> None:
    pytest.importorskip("numpy")
    found = await grade_one("import numpy\nprint(numpy.__name__)", answer([""], ["numpy"]))
    if found["reward"] != 1.0:
        pytest.skip(f"{sys.executable} has its numpy where sandboxed programs do not see it")
    program = "import numpy as np\ndef f(xs): return np.sort(np.array(xs))\ndef g(xs): return np.int64(sum(xs))"
    assert (await grade_one(program, answer(["[2, 1]"], ["[1, 2]"], "f")))["reward"] == 1.0
    assert (await grade_one(program, answer(["[2, 1]"], ["3"], "g")))["reward"] == 1.0
