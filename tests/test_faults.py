import asyncio
import json
from functools import partial, wraps
from pathlib import Path

import pytest

from rollfeed.config import validate_settings
from rollfeed.errors import EngineUnavailableError, RewardError, RunFailedError
from rollfeed.faults import blaming, complaint, describe

HERE = Path(__file__).name


def broken(value: int, *, divisor: int = 0) -> float:
    return value / divisor


def reads_nothing(text: str) -> object:
    return json.loads(text)


class Policy:
    def __call__(self) -> float:
        return broken(1)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("function", "name"), [(partial(broken, 1), "broken"), (Policy(), "Policy"), (lambda: broken(1), "<lambda>")]
)
def test_an_error_names_the_setting_the_function_and_the_innermost_line_of_the_user(function, name: str) -> None:
    with pytest.raises(RunFailedError) as caught, blaming("plugins.advantage", function):
        function()
    message = str(caught.value)
    assert message.startswith("plugins.advantage (")
    assert f"{name}): ZeroDivisionError: division by zero (" in message
    assert message.endswith(f"{HERE}:{line_of('return value / divisor')}, in broken)")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_library_that_raises_is_not_the_place_to_look_at() -> None:
    with pytest.raises(RunFailedError) as caught, blaming("plugins.reward", reads_nothing):
        reads_nothing("")
    assert str(caught.value).endswith(f"{HERE}:{line_of('return json.loads')}, in reads_nothing)")


def test_rollfeed_itself_is_not_the_place_to_look_at() -> None:
    def reads_settings() -> object:
        return validate_settings({}, where="mine")

    with pytest.raises(RunFailedError) as caught, blaming("plugins.group_filters", reads_settings):
        reads_settings()
    assert "mine: no prompts" in str(caught.value)
    assert str(caught.value).endswith(f"{HERE}:{line_of('return validate_settings')}, in reads_settings)")


def test_the_definition_is_named_where_no_line_of_the_user_raised() -> None:
    @wraps(broken)
    def wrapped() -> None: ...

    with pytest.raises(RunFailedError) as caught, blaming("plugins.tracker", wrapped):
        json.loads("")
    here = str(caught.value)
    assert "JSONDecodeError" in here
    assert HERE in here
    assert str(complaint("plugins.x", broken, "returned 3; return a list")) == (
        f"plugins.x ({__name__}:broken) returned 3; return a list ({place_of_broken()})"
    )


def place_of_broken() -> str:
    path = Path(__file__)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line_of('def broken')}"


def test_what_has_been_said_is_passed_on_and_our_own_mistakes_stay_what_they_are() -> None:
    said = RunFailedError("said")
    with pytest.raises(RunFailedError) as caught, blaming("plugins.rollout", broken):
        raise said
    assert caught.value is said
    with pytest.raises(EngineUnavailableError), blaming("plugins.rollout", broken):
        raise EngineUnavailableError("gone")
    with pytest.raises(KeyError), blaming("filters.dynamic_sampling", describe):
        raise KeyError("ours")
    with (
        pytest.raises(RunFailedError, match=r"^filters.dynamic_sampling: no such key \("),
        blaming("filters.dynamic_sampling", describe),
    ):
        raise RewardError("no such key")


def test_the_first_of_several_errors_is_described_on_one_line() -> None:
    group = ExceptionGroup("several", [ExceptionGroup("inner", [ValueError("a\n  b")]), KeyError("c")])
    assert describe(group) == "ValueError: a b"


async def test_a_cancellation_is_an_error_unless_somebody_cancelled() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RunFailedError, match=r"gives_up\): CancelledError"), blaming("plugins.generate", gives_up):
        await gives_up()

    async def waits() -> None:
        with blaming("plugins.generate", waits):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_an_exit_is_an_error_like_others() -> None:
    with pytest.raises(RunFailedError, match="SystemExit: 3"), blaming("plugins.advantage", broken):
        raise SystemExit(3)
