"""Runs a model's program inside a sandbox; imports the standard library only.

``runner.py stdin`` runs ``solution.py`` as a script. ``runner.py call NAME`` reads the arguments as a JSON list from
standard input, calls the function or the method of ``Solution``, and writes the result as JSON to the standard output
that it started with; what the program prints goes to standard error. Nothing here knows what is expected.
"""

import builtins
import collections
import importlib
import io
import json
import os
import re
import resource
import sys
import types
from typing import Any

RECURSION_LIMIT = 50_000
STACK_BYTES = 96 * 1024**2
"""For calls through C, such as those of cached functions; within the gap that every kernel leaves below the stack."""

# Contest programs leave these imports out, since the sites where they are written have them.
HELPERS = {
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache partial reduce total_ordering",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise "
    "permutations product repeat starmap takewhile zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log10 log2 perm pi prod sqrt",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Optional Sequence Set "
    "Tuple TypeVar Union",
}
MODULES = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json"),
    *("math", "operator", "os", "random", "re", "statistics", "string", "sys", "time", "typing"),
)


def helpers_for(source: str) -> dict[str, Any]:
    """Return the modules and names that a program may use without importing them, as far as it names them."""
    words = set(re.findall(r"\w+", source))
    modules = {name: importlib.import_module(name) for name in MODULES if name in words}
    names = {
        name: getattr(importlib.import_module(module), name)
        for module, known in HELPERS.items()
        for name in words.intersection(known.split())
    }
    # The one word that is a module's name and a function's.
    if re.search(r"\bbisect\s*\.", source):
        names.pop("bisect", None)
    return {**modules, **names}


def load(name: str) -> dict[str, Any]:
    """Run the program as module ``name`` and return its globals."""
    with open("solution.py", encoding="utf-8-sig", errors="replace") as file:
        source = file.read()
    module = types.ModuleType(name)
    module.__dict__.update(helpers_for(source), __file__="solution.py")
    sys.modules[name] = module
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    return module.__dict__


def call(name: str) -> None:
    """Call the program's function and write its result."""
    text = sys.stdin.read()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdin = io.StringIO("")
    found = load("solution")
    owner = found.get("Solution")
    function = getattr(owner(), name, None) if owner is not None else None
    result = (function if function is not None else found[name])(*json.loads(text))
    channel.write(json.dumps(plain(result)))
    channel.flush()


def own_stdin() -> None:
    """Make standard input a file of our own: programs may open ``/dev/stdin``, but not a pipe of another user."""
    file = os.open(os.environ["TMPDIR"], os.O_TMPFILE | os.O_RDWR)
    while part := os.read(0, 1 << 16):
        os.write(file, part)
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)


def plain(value: Any) -> Any:
    """Return a result as JSON values, or raise TypeError for classes of the program, which compare as they like."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple, collections.deque):
        return [plain(entry) for entry in value]
    if type(value) in (set, frozenset):
        return sorted(plain(entry) for entry in value)
    if type(value) in (dict, collections.defaultdict, collections.Counter, collections.OrderedDict):
        return {key if type(key) is str else json.dumps(plain(key)): plain(entry) for key, entry in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"the result is a {type(value).__name__}, not a number, text, list or dictionary")


def main() -> None:
    """Do what the command line says."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard == resource.RLIM_INFINITY or hard >= STACK_BYTES:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    sys.set_int_max_str_digits(0)
    for name in ("exit", "quit"):  # made by the site module, which starts slowly
        setattr(builtins, name, sys.exit)
    packages = f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    sys.path += [packages, "/usr/lib/python3/dist-packages"]
    mode, *names = sys.argv[1:]
    sys.argv = ["solution.py"]
    if mode == "call":
        call(names[0])
    else:
        own_stdin()
        load("__main__")


if __name__ == "__main__":
    main()
