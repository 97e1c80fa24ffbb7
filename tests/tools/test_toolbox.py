"""Whatever a tool does becomes an answer or a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.tools.conftest import OneTool

from rollfeed.errors import ConfigError, ToolError
from rollfeed.protocols import ToolAnswer, ToolFailure


def returning(value: Any) -> OneTool:
    async def do(arguments: object) -> Any:
        return value

    return OneTool(do)


def raising(error: BaseException) -> OneTool:
    async def do(arguments: object) -> Any:
        raise error

    return OneTool(do)


@pytest.mark.parametrize(
    ("value", "text"),
    [("yes", "yes"), (3, "3"), ({"a": [1, None]}, '{"a": [1, null]}'), ("", ""), (None, "null"), ("\ud83d", "\ufffd")],
)
async def test_texts_and_json_values_are_answers(box_of, value: Any, text: str) -> None:
    assert await box_of(returning(value)).call("one", {}) == ToolAnswer(text)


@pytest.mark.parametrize("value", [b"\xff\x00", object(), {1, 2}, {"a": b""}])
async def test_what_is_no_text_is_a_failure(box_of, value: Any) -> None:
    outcome = await box_of(returning(value)).call("one", {})
    assert isinstance(outcome, ToolFailure)
    assert f"a {type(value).__name__}, which is no text" in outcome.text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ToolError("try again"), "try again"),
        (ValueError("broken\nand more"), "one failed: ValueError: broken"),
        (SystemExit(3), "one failed: SystemExit: 3"),
        (asyncio.CancelledError(), "one was interrupted"),
        (RecursionError("deep"), "one failed: RecursionError: deep"),
        (KeyboardInterrupt(), "one failed: KeyboardInterrupt"),
    ],
)
async def test_what_a_tool_raises_is_told(box_of, error: BaseException, told: str) -> None:
    assert await box_of(raising(error)).call("one", {}) == ToolFailure(told)


async def test_a_flood_is_cut_in_the_middle(box_of) -> None:
    outcome = await box_of(returning("a" * 5_000_000 + "z")).call("one", {})
    assert outcome == ToolAnswer(f"{'a' * 50}\n[4,999,901 characters are left out]\n{'a' * 49}z")
    flood = await box_of(raising(ToolError("b" * 1_000_000))).call("one", {})
    assert len(flood.text) < 200


async def test_a_tool_that_hangs_or_will_not_be_cancelled_is_left(box_of) -> None:
    freed = asyncio.Event()

    async def do(arguments: object) -> str:
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    async with box_of(OneTool(do), timeout_seconds=0.01) as box:
        assert await box.call("one", {}) == ToolFailure("one gave no answer within 0.01 s")
        freed.set()


async def test_calls_under_way_end_with_the_box(box_of) -> None:
    begun, ended = asyncio.Event(), []

    async def do(arguments: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with box_of(OneTool(do)) as box:
        call = asyncio.create_task(box.call("one", {}))
        await begun.wait()
    assert ended == [True]
    assert await call == ToolFailure("one was interrupted")


async def test_a_cancelled_episode_cancels_its_call(box_of) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def do(arguments: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.create_task(box_of(OneTool(do)).call("one", {}))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await ended.wait()


@pytest.mark.parametrize(
    ("name", "arguments", "fitted"),
    [
        ("one", {"x": 1}, {"x": 1}),
        ("one", {"x": "1", "how": "a"}, {"x": 1, "how": "a"}),
        ("one", {"x": 1.0}, {"x": 1.0}),
        ("two", {}, "there is no tool 'two'; known here: one"),
        ("one", {}, "argument 'x' is missing: it takes x, how"),
        ("one", {"x": 1, "y": 2}, "there is no argument 'y': it takes x, how"),
        ("one", {"x": "many"}, "argument 'x': it must be integer, is 'many'"),
        ("one", {"x": True}, "argument 'x': it must be integer, is True"),
        ("one", {"x": 1, "how": "c"}, "argument 'how': it must be one of 'a', 'b', is 'c'"),
    ],
)
def test_arguments_are_made_to_fit_or_refused(box_of, name: str, arguments: Any, fitted: Any) -> None:
    found = box_of(returning("")).fitted(name, arguments)
    assert (found.text.removeprefix("one: ") if isinstance(found, ToolFailure) else found) == fitted


def test_two_tools_of_one_name_are_refused(box_of) -> None:
    with pytest.raises(ConfigError, match="two tools are called 'one'"):
        box_of(returning(""), returning(""))
