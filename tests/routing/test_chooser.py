"""Where requests go: candidates only, sessions by their whole keys, nothing across versions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.routing import Chooser, RoutingSettings, ServerLoadView

PROMPT = np.arange(2000, dtype=np.int32)


def idle(*addresses: str) -> list[ServerLoadView]:
    return [ServerLoadView(address, 0, 0) for address in addresses]


def busy(**num_requests: int) -> list[ServerLoadView]:
    return [ServerLoadView(address, count, 0) for address, count in num_requests.items()]


def test_a_session_stays_where_it_is_until_that_server_is_full_gone_or_at_another_version() -> None:
    chooser = Chooser()
    home = chooser.choose(idle("a", "b"), PROMPT[:10], policy_version=1, session="s").address
    other = "b" if home == "a" else "a"
    choice = chooser.choose(busy(**{home: 5, other: 0}), PROMPT[5:], policy_version=1, session="s")
    assert (choice.address, choice.reason) == (home, "session")
    full = busy(**{home: 9, other: 0})
    assert chooser.choose(full, PROMPT[:10], policy_version=1, session="s").address == other
    assert chooser.choose(idle(home, other), PROMPT[5:], policy_version=1, session="s").address == other
    assert chooser.choose(idle(home), PROMPT[5:], policy_version=1, session="s").address == home
    assert chooser.choose(busy(**{home: 1, other: 0}), PROMPT[5:], policy_version=2, session="s").reason == "load"


def test_keys_are_compared_whole() -> None:
    chooser = Chooser()
    chooser.choose(busy(a=0, b=1), PROMPT[:1], policy_version=1, session="session-1")
    choice = chooser.choose(busy(a=1, b=0), PROMPT[1:2], policy_version=1, session="session-12")
    assert (choice.address, choice.reason) == ("b", "load")
    choice = chooser.choose(busy(a=1, b=0), PROMPT[1:2], policy_version=1, session="session-1")
    assert (choice.address, choice.reason) == ("a", "session")


def test_samples_of_a_group_meet_until_their_server_is_full() -> None:
    chooser, counts = Chooser(), {"a": 0, "b": 0}
    for _ in range(20):
        choice = chooser.choose(busy(**counts), PROMPT[:50], policy_version=1, group="7")
        counts[choice.address] += 1
    assert sorted(counts.values()) == [9, 11]


def test_a_prefix_is_worth_its_tokens_and_a_request_its_share() -> None:
    chooser = Chooser(RoutingSettings(request_tokens=100))
    chooser.ended("a", PROMPT, policy_version=1)
    choice = chooser.choose(busy(a=19, b=0), PROMPT, policy_version=1)
    assert (choice.address, choice.num_cached, choice.reason) == ("a", 1999, "prefix")
    choice = chooser.choose(busy(a=21, b=0), np.append(PROMPT, 7), policy_version=1)
    assert (choice.address, choice.num_cached, choice.reason) == ("b", 0, "load")


def test_a_full_cache_spills() -> None:
    chooser = Chooser()
    chooser.choose(idle("a"), PROMPT, policy_version=1, session="s")
    servers = [ServerLoadView("a", 1, 0, kv_use=0.99), ServerLoadView("b", 5, 0, kv_use=0.5)]
    assert chooser.choose(servers, PROMPT, policy_version=1, session="s").address == "b"


def test_a_long_conversation_waits_at_a_full_server_rather_than_be_computed_again() -> None:
    chooser = Chooser()
    long = np.arange(6000, dtype=np.int32)
    chooser.choose(idle("a"), long, policy_version=1, session="s")
    servers = [ServerLoadView("a", 1, 0, kv_use=0.99), ServerLoadView("b", 5, 0, kv_use=0.5)]
    choice = chooser.choose(servers, long, policy_version=1, session="s")
    assert (choice.address, choice.num_cached) == ("a", 5999)


def test_a_server_that_came_back_is_believed_to_have_nothing() -> None:
    chooser = Chooser()
    chooser.choose(idle("a"), PROMPT, policy_version=1, session="s", group="g")
    chooser.forget_server("a")
    choice = chooser.choose(busy(a=1, b=0), PROMPT, policy_version=1, session="s", group="g")
    assert (choice.address, choice.num_cached, choice.reason) == ("b", 0, "load")


def test_without_a_server_it_says_so() -> None:
    with pytest.raises(ValueError, match="no server"):
        Chooser().choose([], PROMPT, policy_version=1)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
REQUESTS = st.lists(
    st.tuples(
        st.sets(st.sampled_from("abcd"), min_size=1),
        PROMPTS,
        st.integers(1, 4),
        st.one_of(st.none(), st.sampled_from(["s", "s1", "s12"])),
        st.booleans(),
    ),
    max_size=30,
)


@given(REQUESTS, st.integers(1, 3))
def test_a_choice_is_a_candidate_and_no_prefix_crosses_a_version(
    requests: list[tuple[set[str], list[int], int, str | None, bool]], most_compared: int
) -> None:
    chooser = Chooser(RoutingSettings(most_compared=most_compared))
    had: list[tuple[str, int, list[int]]] = []
    for addresses, token_ids, version, session, has_ended in requests:
        choice = chooser.choose(
            idle(*sorted(addresses)), np.array(token_ids, np.int32), policy_version=version, session=session
        )
        assert choice.address in addresses
        prefix = token_ids[: choice.num_cached]
        assert choice.num_cached < len(token_ids)
        assert not prefix or any(
            (address, at) == (choice.address, version) and text[: len(prefix)] == prefix for address, at, text in had
        )
        had.append((choice.address, version, token_ids))
        if has_ended:
            chooser.ended(choice.address, np.array([*token_ids, 1], np.int32), policy_version=version)
            had.append((choice.address, version, [*token_ids, 1]))
