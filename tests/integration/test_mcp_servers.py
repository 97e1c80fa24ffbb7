"""MCP servers as tools, over standard input and output and over HTTP; those that die, answer late or are none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollfeed.config.tools import McpServerSettings, ToolSettings
from rollfeed.errors import ConfigError
from rollfeed.protocols import ToolAnswer, ToolFailure
from rollfeed.tools import LimitedToolbox
from rollfeed.tools.mcp_servers import mcp_tools

pytest.importorskip("mcp")
EXAMPLE = Path(__file__).parents[2] / "examples" / "mcp-server"
ODD = Path(__file__).with_name("odd_mcp_server.py")


def box_of(*servers: McpServerSettings, folders: Sequence[Path] = (), **limits: Any) -> LimitedToolbox:
    given = {"timeout_seconds": 30.0, "max_output_chars": 200, **limits}
    tools = mcp_tools(servers, folders=folders)
    return LimitedToolbox(tools, ToolSettings(max_turns=8, max_seconds=60.0, **given))


def command(*args: str, **others: Any) -> McpServerSettings:
    return McpServerSettings(name="server", command="python", args=args, **others)


async def check_countries(box: LimitedToolbox) -> None:
    capital, population = (definition["function"] for definition in box.definitions)
    assert (capital["name"], capital["description"]) == ("capital", "Return the capital of a country.")
    assert population["parameters"]["required"] == ["country"]
    assert box.is_idempotent("capital")
    async with box:
        assert await box.call("capital", {"country": "Peru"}) == ToolAnswer("Lima")
        assert await box.call("population", {"country": "Peru"}) == ToolAnswer("34")
        assert isinstance(await box.call("capital", {"country": "Atlantis"}), ToolFailure)


async def test_the_example_is_a_tool_over_its_input_and_output() -> None:
    await check_countries(box_of(command("server.py"), folders=[EXAMPLE]))


@pytest.fixture
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    arguments = [sys.executable, str(EXAMPLE / "server.py"), "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


async def test_the_example_is_a_tool_over_http_and_may_end(serving: tuple[subprocess.Popen[str], str]) -> None:
    process, url = serving
    box = box_of(McpServerSettings(name="server", url=url))
    await check_countries(box)
    async with box:
        assert await box.call("capital", {"country": "Peru"}) == ToolAnswer("Lima")
        process.kill()
        process.wait()
        for _ in range(2):
            outcome = await box.call("capital", {"country": "Peru"})
            assert isinstance(outcome, ToolFailure)
            assert "\n" not in outcome.text


async def test_a_server_that_dies_is_started_again_for_the_next_call() -> None:
    async with box_of(command(str(ODD))) as box:
        assert await box.call("fine", {}) == ToolAnswer("fine it is")
        outcome = await box.call("die", {})
        assert isinstance(outcome, ToolFailure)
        assert outcome.text.startswith("the server of die has ended before it answered")
        assert await box.call("fine", {}) == ToolAnswer("fine it is")
        assert not box.is_idempotent("die")


async def test_calls_at_once_after_a_death_share_one_new_server() -> None:
    box = box_of(command(str(ODD)))
    async with box:
        await box.call("die", {})
        answers = await asyncio.gather(*(box.call("fine", {}) for _ in range(8)))
        assert answers == [ToolAnswer("fine it is")] * 8
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "MCP server"]) == 1


async def test_a_call_that_may_be_repeated_is_where_the_server_had_ended() -> None:
    async with box_of(command(str(ODD))) as box:
        dying = [box.call("die", {}), box.call("fine", {})]
        assert (await asyncio.gather(*dying))[1] == ToolAnswer("fine it is")


async def test_what_servers_should_not_do_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    async with box_of(command(str(ODD))) as box:
        flood = await box.call("flood", {})
        assert isinstance(flood, ToolAnswer)
        assert len(flood.text) < 300
        assert await box.call("image", {}) == ToolAnswer("[image, which cannot be shown]")
        assert await box.call("refuse", {}) == ToolFailure("not today")
        assert await box.call("nonsense", {}) == ToolAnswer("nonsense it is")


async def test_an_answer_that_comes_late_is_not_taken_for_another() -> None:
    async with box_of(command(str(ODD)), timeout_seconds=0.2) as box:
        assert isinstance(await box.call("late", {}), ToolFailure)
        while isinstance(outcome := await box.call("fine", {}), ToolFailure):
            assert outcome.text == "fine gave no answer within 0.2 s"
        assert outcome == ToolAnswer("fine it is")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServerSettings(name="server", command="/no/such/program"), "cannot be used: FileNotFoundError"),
        (command("-c", "import sys; sys.exit('out of ink')"), r"cannot be used: .*out of ink"),
        (command("-c", "import time; time.sleep(60)", start_seconds=0.5), "did not say within 0.5 s what tools"),
        (McpServerSettings(name="server", url="http://127.0.0.1:1/mcp"), "cannot be used: "),
        (command(str(ODD), tools=("fine", "finer")), "has no tool 'finer'; it has fine, die"),
    ],
)
def test_a_server_that_is_none_is_refused_in_one_line(server: McpServerSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=f"MCP server 'server' {message}") as refused:
        mcp_tools([server], folders=())
    assert "\n" not in str(refused.value)


def test_two_servers_with_one_tool_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are called 'fine'"):
        box_of(command(str(ODD), tools=("fine",)), command(str(ODD), tools=("fine",)))
