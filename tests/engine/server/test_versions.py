from contextlib import suppress
from typing import Any

from rollfeed.engine.server.service import WeightVersions
from rollfeed.errors import EngineProtocolError


def test_default_is_0_and_digits_are_their_integer() -> None:
    versions = WeightVersions()
    assert (versions.number("default"), versions.number("12"), versions.number("0")) == (0, 12, 0)
    assert versions.name(12) == "12"
    assert versions.name(0) == "0"
    assert versions.name(5) == "5"


def test_other_names_get_integers_that_no_digits_have() -> None:
    versions = WeightVersions()
    first, second = versions.number("v7"), versions.number("step-8")
    assert first != second
    assert min(first, second) > 10**12
    assert versions.number("v7") == first
    assert versions.name(first) == "v7"
    assert versions.number("9" * 400) != versions.number("8" * 400)


def test_the_name_given_last_is_the_one_told() -> None:
    versions = WeightVersions()
    assert versions.number("7") == versions.number("007")
    assert versions.name(7) == "007"
    versions.number("7")
    assert versions.name(7) == "7"


def test_the_name_of_what_is_served_stays_however_many_come_and_memory_is_bounded() -> None:
    versions = WeightVersions()
    served = versions.number("mine")
    last = [versions.number(f"v{number}", served=served) for number in range(3000)][-1]
    assert versions.name(served) == "mine"
    assert versions.number("mine", served=served) == served
    assert versions.name(last) == "v2999"
    assert len(versions._name_of) == len(versions._number_of) == 1000


def test_a_name_that_comes_again_is_as_new_as_it_was_then() -> None:
    versions = WeightVersions()
    again = versions.number("again")
    for number in range(2000):
        versions.number(f"v{number}")
        if number % 500 == 0:
            assert versions.number("again") == again


async def test_weights_that_are_refused_under_many_names_leave_the_name_of_those_that_are_served(serving: Any) -> None:
    async with serving() as client:
        await client.post("/update_weight_version", {"new_version": "mine", "abort_all_requests": False})
        for number in range(1100):
            with suppress(EngineProtocolError):
                await client.service.update_from_disk("/none", f"v{number}", abort_running=False)
        assert (await client.get("/model_info"))["weight_version"] == "mine"
        assert (await client.generate([5], max_new_tokens=1))["meta_info"]["weight_version"] == "mine"
