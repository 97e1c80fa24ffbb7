"""The built-in tools, and those that users write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tools.conftest import OneTool

from rollfeed.config.tools import ToolSettings
from rollfeed.errors import ConfigError, PluginError, ToolError
from rollfeed.protocols import ToolFailure
from rollfeed.tools import make_tools
from rollfeed.tools.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 3) * 4", "60"),
        ("2^10", "1024"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("-3 // 2", "-2"),
        ("10 % 4", "2"),
        ("12 × 3 − 1", "35"),  # noqa: RUF001
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("2 * pi", "6.28318530718"),
        ("factorial(20)", "2432902008176640000"),
        ("1e300 * 10", "1e+301"),
    ],
)
def test_the_calculator_works_out(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1 +", "x", "'a' * 3", "[1]", "1; 2", "True + 1", "a.b", "__import__('os')", "(1).real", "open('x')"),
        *("1/0", "0 ** -1", "9**9**9", "2 ** 100000", "factorial(100000)", "factorial(-1)", "factorial(1.5)"),
        *("sqrt(-1)", "(-8) ** 0.5", "1e400", "1e300 ** 2", "max()", "round(1, 2, 3)", "sqrt(x=1)", "lambda: 1"),
        *("(" * 500 + "1" + ")" * 500, "1+" * 600 + "1", "9" * 2000, "\x00", "round(5, -(10**9))"),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic_or_too_much(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


def tools_of(settings: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
    services = {"sandboxes": SimpleNamespace(), "memory_bytes": 1 << 30, "workers": None, **others}
    made = make_tools(ToolSettings.model_validate(settings), folders=[folder], find_entry_points=lambda: (), **services)
    return {tool.name: tool for tool in made}


async def test_search_returns_the_passages_that_fit(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    rows = [
        {"title": "Otters", "text": "Otters swim in rivers and eat fish."},
        {"title": "Owls", "text": "Owls hunt mice at night."},
        {"id": 7, "contents": "Whales swim in the sea."},
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"use": ["search"], "search": {"corpus": "corpus.jsonl", "num_results": 2}}
    search = tools_of(settings, tmp_path)["search"]
    assert "Owls hunt mice" in await search.call({"query": "who hunts mice at night?"})
    assert (await search.call({"query": "swim fish"})).startswith("[1] Otters\nOtters swim in rivers")
    for query in ("", "qqq", "the", "\ud83d", "?" * 10_000):
        with pytest.raises(ToolError, match="nothing was found"):
            await search.call({"query": query})


async def test_a_row_of_a_corpus_may_have_line_breaks_of_all_kinds_in_its_text(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    rows = [{"text": "apples\u2028and\x85pears"}, {"text": "plums"}]
    (tmp_path / "corpus.jsonl").write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    search = tools_of({"use": ["search"], "search": {"corpus": "corpus.jsonl"}}, tmp_path)["search"]
    assert "and\x85pears" in await search.call({"query": "apples"})


async def test_search_reads_a_folder_of_texts(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.md").write_text("first " * 300 + "\n\nsecond about zebras\n\n" + "third " * 300)
    (tmp_path / "texts" / "deep" / "b.txt").write_bytes(b"\xff penguins")
    search = tools_of({"use": ["search"], "search": {"corpus": "texts"}}, tmp_path)["search"]
    assert await search.call({"query": "zebras"}) == "[1] a.md\nsecond about zebras"
    assert "deep/b.txt" in await search.call({"query": "penguins"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "no text in it"),
        ("{", "line 1: not JSON"),
        ("[" * 9999, "line 1: not JSON"),
        ('{"title": "a"}', "line 1: no text"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    pytest.importorskip("bm25s")
    if content is not None:
        (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        tools_of({"use": ["search"], "search": {"corpus": "c.jsonl"}}, tmp_path)


async def test_files_are_listed_read_and_written_within_the_folder(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("one")
    tools = tools_of({"use": ["files"], "files": {"folder": "files", "is_writable": True}}, tmp_path)
    assert await tools["write_file"].call({"path": "new/deep/b.txt", "content": "longer"}) == "wrote 6 bytes"
    assert await tools["write_file"].call({"path": "new/deep/b.txt", "content": "two"}) == "wrote 3 bytes"
    assert await tools["read_file"].call({"path": "new/deep/b.txt"}) == "two"
    assert await tools["list_files"].call({}) == "a.txt\nnew/"
    assert await tools["list_files"].call({"path": "new"}) == "deep/"
    assert not tools["write_file"].is_idempotent
    readable = tools_of({"use": ["files"], "files": {"folder": "files"}}, tmp_path)
    assert sorted(readable) == ["list_files", "read_file"]


async def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "files" / "sub").mkdir(parents=True)
    (tmp_path / "files" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "files" / "up").symlink_to(tmp_path)
    (tmp_path / "files" / "binary").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "files" / "pipe")
    tools = tools_of({"use": ["files"], "files": {"folder": "files", "is_writable": True}}, tmp_path)
    bad = ["../secret", "/etc/passwd", "sub/../../secret", "link", "up/secret", "", ".", "a\x00b", "sub", "pipe"]
    for path in [*bad, "none", "binary", "x" * 5_000]:
        with pytest.raises(ToolError):
            await tools["read_file"].call({"path": path})
    for path in bad:
        with pytest.raises(ToolError):
            await tools["write_file"].call({"path": path, "content": "gone"})
    for path in ("..", "/", "up", "none"):
        with pytest.raises(ToolError):
            await tools["list_files"].call({"path": path})
    assert (tmp_path / "secret").read_text() == "secret"


OWN = '''
class Shout:
    name = "shout"
    description = "shouts"
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    is_idempotent = True
    async def call(self, arguments):
        return arguments["text"].upper()

class Plain(Shout):
    def call(self, arguments):
        return ""

async def weather(city: str, days: int = 1) -> dict:
    """Tell the weather.

    City is its name."""
    return {city: days}

def add(a: int, b: int) -> int:
    return a + b

def odd(*values): ...
bad = 3
'''


async def test_own_tools_are_classes_and_functions(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    seen: list[Any] = []

    class Workers:
        async def call(self, path: str, args: list[Any], **limits: Any) -> Any:
            seen.append((path, args, limits))
            return 3

    tools = tools_of({"use": ["own.py:Shout", "own.py:weather", "own.py:add"]}, tmp_path, workers=Workers())
    assert await tools["shout"].call({"text": "a"}) == "A"
    assert await tools["weather"].call({"city": "Lima"}) == {"Lima": 1}
    assert tools["weather"].description == "Tell the weather.\n\nCity is its name."
    assert tools["weather"].parameters["required"] == ["city"]
    assert tools["weather"].parameters["properties"]["days"]["type"] == "integer"
    assert await tools["add"].call({"a": 1, "b": 2}) == 3
    path, args, limits = seen[0]
    assert (args, limits) == (["own.py:add", [str(tmp_path)], {"a": 1, "b": 2}], {"deadline_seconds": 30.0})
    from rollfeed.tools import own_functions

    assert path == "rollfeed.tools.own_functions.call_function"
    assert own_functions.call_function(*args) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calculatr", "no tool 'calculatr'; did you mean calculator"),
        ("own.py:None_", "has no 'None_'"),
        ("own.py:bad", "lacks name"),
        ("own.py:odd", "parameter 'values' cannot be given by its name"),
        ("own.py:Plain", "call must be async"),
        ("search", "set tools.search.corpus"),
        ("files", "set tools.files.folder"),
    ],
)
def test_a_tool_that_is_none_is_refused_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=message) as refused:
        tools_of({"use": [name]}, tmp_path)
    assert "\n" not in str(refused.value)


def test_tools_of_packages_are_found_by_name() -> None:
    point = SimpleNamespace(name="one", value="package:one", load=lambda: OneTool(None))
    services = {"sandboxes": None, "memory_bytes": 1, "workers": None}
    (tool,) = make_tools(ToolSettings(use=("one",)), find_entry_points=lambda: [point], **services)
    assert tool.name == "one"

    def broken() -> Any:
        raise ImportError("no such module")

    with pytest.raises(PluginError, match="cannot be loaded: ImportError: no such module"):
        make_tools(
            ToolSettings(use=("one",)),
            find_entry_points=lambda: [SimpleNamespace(name="one", value="p:one", load=broken)],
            **services,
        )


async def test_the_calculator_is_called_with_what_fits(box_of, tmp_path: Path) -> None:
    box = box_of(*tools_of({"use": ["calculator"]}, tmp_path).values())
    assert (await box.call("calculator", {"expression": "1 + 1"})).text == "2"
    assert isinstance(box.fitted("calculator", {"expression": 3}), ToolFailure)


@pytest.mark.parametrize("server", [{}, {"command": "python", "url": "http://a:1"}, {"url": "ftp://a"}])
def test_an_mcp_server_has_a_command_or_a_url(server: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"needs a command, or a url|should match pattern"):
        ToolSettings.model_validate({"mcp": [{"name": "server", **server}]})
