"""Judges behind real servers on loopback that fail in all ways: counted, and never a wrong score."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import pairwise, permutations
from typing import Any

import pytest
from tests.rewards.judging.conftest import judge_server

from rollfeed.config import JudgeSettings
from rollfeed.errors import ConfigError
from rollfeed.rewards.judging import Judge, JudgeCounts, Panel
from rollfeed.rewards.over_http.json_server import retry_after
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import Outcome, Verdict

Make = Callable[..., JudgeSettings]
LETTERS = {"reply": "letter", "choices": {"good": 1.0, "bad": 0.0}}


def judged(settings: JudgeSettings, ask: Callable[[Judge], Coroutine[Any, Any, Any]]) -> tuple[Any, dict[str, float]]:
    """Return what a judge said in virtual time, and the metrics of it."""
    counts = JudgeCounts()

    async def main() -> Any:
        judge = Judge(settings, name="reward.judge", counts=counts)
        try:
            return await ask(judge)
        finally:
            await judge.close()

    return run_in_virtual_time(main()), counts.take()


def score_of(text: str) -> str:
    """A judge that finds an answer as good as it is long."""
    return f"Score: {len(text.split(' A ')[-1])}"


def replies(*given: Any) -> Callable[[str], Any]:
    """A server that answers one request after the other so; the last for ever."""
    left = list(given)
    return lambda text: left.pop(0) if len(left) > 1 else left[0]


async def hang(text: str) -> Any:
    await asyncio.Event().wait()


async def one(url: str, make: Make, says: Any, **settings: Any) -> tuple[Verdict, dict[str, float], Any]:
    counts = JudgeCounts()
    async with judge_server(says) as server:
        judge = Judge(make(server.url, **settings), name="reward.judge", counts=counts)
        verdict = await judge("abc", None, {"prompt_text": "p"})
        await judge.close()
        return verdict, counts.take(), server


def test_the_verdict_says_what_was_said_and_the_request_what_was_set(judge_settings: Make, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    settings = {
        "system_prompt": "be fair",
        "api_key_env": "JUDGE_KEY",
        "seed": 3,
        "prompt_price": 2.0,
        "completion_price": 10.0,
        "extra_body": {"reasoning_effort": "low", "temperature": {}},
    }
    verdict, metrics, server = run_in_virtual_time(one("", judge_settings, score_of, **settings))
    assert (verdict.reward, verdict.outcome) == (3.0, Outcome.OK)
    assert verdict.detail == "judge (20 + 5 tokens): Score: 3"
    assert server.keys == ["Bearer secret-7"]
    assert server.bodies == [
        {
            "model": "judge",
            "messages": [{"role": "system", "content": "be fair"}, {"role": "user", "content": "Q p A abc"}],
            "seed": 3,
            "max_tokens": 1024,
            "reasoning_effort": "low",
        }
    ]
    assert (metrics["judge/calls"], metrics["judge/prompt_tokens"], metrics["judge/completion_tokens"]) == (1, 20, 5)
    assert metrics["judge/cost"] == pytest.approx(90e-6)


FAULTS = {
    "nonsense": ("I like it.", "unreadable", Outcome.ERROR, "no verdict, as it has no number"),
    "no completion": ({"text": "{}"}, "unreadable", Outcome.ERROR, "no chat completion"),
    "no json": ({"text": "<html>"}, "unreadable", Outcome.ERROR, "not JSON: <html>"),
    "cut off": ({"content": "Score: 1", "finish": "length"}, "unreadable", Outcome.ERROR, "cut off"),
    "out of range": ("Score: 11", "unreadable", Outcome.ERROR, "not from 0 to 10"),
    "no model": ({"status": 404, "text": "no such model"}, "http", Outcome.ERROR, "HTTP 404: no such model"),
    "no key": ({"status": 401, "text": ""}, "http", Outcome.ERROR, "reward.judge.api_key_env"),
    "broken": ({"status": 500, "text": "x"}, "http", Outcome.ERROR, "HTTP 500: x (3 tries)"),
    "silent": (hang, "timeout", Outcome.TIMEOUT, "no reply within timeout_seconds = 60 (3 tries)"),
    "busy for ever": ({"status": 429, "text": "slow down"}, "rate_limited", Outcome.ERROR, "patience_seconds = 600"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_question_without_a_verdict_is_counted_and_has_no_score(judge_settings: Make, fault: str) -> None:
    reply, kind, outcome, told = FAULTS[fault]
    says = reply if callable(reply) else replies(reply)
    verdict, metrics, _ = run_in_virtual_time(one("", judge_settings, says, max_tries=3))
    assert (verdict.reward, verdict.outcome) == (None, outcome)
    assert told in verdict.detail
    failures = {name: value for name, value in metrics.items() if name.startswith("judge/error_") and value}
    assert failures == {f"judge/error_{kind}": 1.0}


def test_a_server_that_is_not_there_is_a_failure_with_its_address(judge_settings: Make) -> None:
    async def ask(judge: Judge) -> Verdict:
        return await judge("abc", None, {})

    verdict, metrics = judged(judge_settings("http://127.0.0.1:9/v1"), ask)
    assert verdict.outcome is Outcome.ERROR
    assert "http://127.0.0.1:9/v1/chat/completions" in verdict.detail
    assert metrics["judge/error_connection"] == 1.0


@pytest.mark.parametrize(
    "fault", [{"status": 429, "text": ""}, {"status": 500, "text": ""}, {"status": 408, "text": ""}]
)
def test_what_may_succeed_later_is_tried_again(judge_settings: Make, fault: Any) -> None:
    verdict, metrics, _ = run_in_virtual_time(one("", judge_settings, replies(fault, fault, "Score: 3")))
    assert verdict.reward == 3.0
    assert (metrics["judge/retries"], metrics["judge/calls"]) == (2.0, 1.0)


def test_a_server_is_left_alone_for_as_long_as_it_says(judge_settings: Make) -> None:
    busy = {"status": 429, "text": "", "headers": {"Retry-After": "20"}}

    async def main() -> tuple[list[Verdict], list[float]]:
        async with judge_server(replies(busy, "Score: 1")) as server:
            judge = Judge(judge_settings(server.url), name="reward.judge")
            first = asyncio.create_task(judge("a", None, {}))
            await asyncio.sleep(1.0)  # in virtual time: it was told to wait by then
            verdicts = [await judge("b", None, {}), await first]
            await judge.close()
            return verdicts, server.times

    verdicts, (asked, *later) = run_in_virtual_time(main())
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
    assert len(later) == 2
    assert min(later) - asked >= 20.0


def test_a_server_that_says_to_wait_no_time_is_asked_less_and_less(judge_settings: Make) -> None:
    busy = {"status": 429, "text": "", "headers": {"Retry-After": "0"}}
    verdict, _, server = run_in_virtual_time(one("", judge_settings, replies(*[busy] * 4, "Score: 1")))
    assert verdict.reward == 1.0
    pauses = [later - asked for asked, later in pairwise(server.times)]
    assert all(pause >= 0.25 * 2**number for number, pause in enumerate(pauses))


@pytest.mark.parametrize("reply", ['{"error": "secret-7 is not known"}', "secret-7 is not known"])
def test_a_key_that_a_server_repeats_is_in_no_verdict(judge_settings: Make, monkeypatch: Any, reply: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    verdict, _, _ = run_in_virtual_time(one("", judge_settings, replies({"text": reply}), api_key_env="JUDGE_KEY"))
    assert verdict.outcome is Outcome.ERROR
    assert "<key> is not known" in verdict.detail
    assert "secret-7" not in verdict.detail


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("2.5", 2.5),
        ("-1", 0.0),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("1 Jan 99999999999999999999 00:00:00 GMT", None),
    ],
)
def test_the_time_to_wait_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


def test_others_are_asked_while_a_server_fails(judge_settings: Make) -> None:
    async def main() -> tuple[list[Verdict], int, int]:
        broken = replies({"status": 503, "text": "", "headers": {"Retry-After": "3000"}})
        async with judge_server(broken) as first, judge_server(score_of) as second:
            judge = Judge(judge_settings(first.url, second.url), name="reward.judge")
            verdicts = [await judge("a" * length, None, {}) for length in range(1, 9)]
            await judge.close()
            return verdicts, len(first.bodies), len(second.bodies)

    verdicts, at_first, at_second = run_in_virtual_time(main())
    assert [verdict.reward for verdict in verdicts] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert (at_first, at_second) == (1, 8)


def test_no_minute_has_more_requests_than_are_allowed(judge_settings: Make) -> None:
    async def main() -> list[float]:
        async with judge_server(replies("Score: 1")) as server:
            judge = Judge(judge_settings(server.url, requests_per_minute=5), name="reward.judge")
            await asyncio.gather(*(judge("a" * length, None, {}) for length in range(12)))
            await judge.close()
            return server.times

    times = run_in_virtual_time(main())
    assert len(times) == 12
    assert all(later - earlier >= 59.9 for earlier, later in zip(times, times[5:], strict=False))


def test_half_of_a_batch_may_fail_alone(judge_settings: Make) -> None:
    async def main() -> list[Verdict]:
        async with judge_server(lambda text: "hm" if len(text.split(" A ")[-1]) % 2 else score_of(text)) as server:
            judge = Judge(judge_settings(server.url), name="reward.judge")
            verdicts = await asyncio.gather(*(judge("a" * length, None, {}) for length in range(1, 9)))
            await judge.close()
            return verdicts

    rewards = [verdict.reward for verdict in run_in_virtual_time(main())]
    assert rewards == [None, 2.0, None, 4.0, None, 6.0, None, 8.0]


def test_requests_are_as_many_at_once_as_there_are_and_never_above_the_limit(judge_settings: Make) -> None:
    async def most_running(**settings: Any) -> int:
        running = most = 0

        async def says(text: str) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.25)
            running -= 1
            return "Score: 1"

        async with judge_server(says) as server:
            judge = Judge(judge_settings(server.url, **settings), name="reward.judge")
            await asyncio.gather(*(judge("a" * length, None, {}) for length in range(100)))
            await judge.close()
        return most

    assert run_in_virtual_time(most_running()) == 100
    assert run_in_virtual_time(most_running(max_concurrency=7)) == 7


def test_equal_questions_are_asked_once(judge_settings: Make) -> None:
    counts = JudgeCounts()

    async def main() -> tuple[list[Verdict], int]:
        async with judge_server(score_of) as server:
            judge = Judge(judge_settings(server.url), name="reward.judge", counts=counts)
            verdicts = await asyncio.gather(*(judge("same", None, {}) for _ in range(8)))
            verdicts.append(await judge("same", None, {}))
            await judge.close()
            return verdicts, len(server.bodies)

    verdicts, num_asked = run_in_virtual_time(main())
    assert num_asked == 1
    assert {verdict.reward for verdict in verdicts} == {4.0}
    assert len({verdict.detail for verdict in verdicts}) == 1
    assert counts.take()["judge/cache_hits"] == 8.0


def test_few_verdicts_are_kept_and_failures_never(judge_settings: Make) -> None:
    async def main() -> list[str]:
        async with judge_server(lambda text: score_of(text) if "b" not in text else "hm") as server:
            judge = Judge(judge_settings(server.url, cache_size=1), name="reward.judge")
            for response in ("a", "a", "b", "b", "c", "a"):
                await judge(response, None, {})
            await judge.close()
            return [question[-1] for question in server.questions]

    assert run_in_virtual_time(main()) == ["a", "b", "b", "c", "a"]


def test_who_is_cancelled_takes_no_answer_from_others(judge_settings: Make) -> None:
    async def main() -> tuple[Any, int]:
        release, asked = asyncio.Event(), asyncio.Event()

        async def says(text: str) -> str:
            asked.set()
            await release.wait()
            return "Score: 1"

        async with judge_server(says) as server:
            judge = Judge(judge_settings(server.url), name="reward.judge")
            first, second = (asyncio.create_task(judge("a", None, {})) for _ in range(2))
            await asked.wait()
            first.cancel()
            release.set()
            verdict = await second
            third = asyncio.create_task(judge("b", None, {}))
            await asyncio.sleep(0)
            third.cancel()
            await asyncio.gather(first, third, return_exceptions=True)
            again = await judge("b", None, {})
            await judge.close()
            return (verdict.reward, again.reward), len({*server.questions})

    assert run_in_virtual_time(main()) == ((1.0, 1.0), 2)


GOOD = {"best": 3, "fair": 2, "fine": 2, "poor": 1}


def better(text: str) -> str:
    """A judge of pairs without a preference for a place."""
    first, second = text.split(": ", 1)[1].removesuffix("?").split(" or ")
    return "C" if GOOD[first] == GOOD[second] else "A" if GOOD[first] > GOOD[second] else "B"


@pytest.mark.parametrize(
    ("says", "rewards", "agreement"),
    [
        (better, [1.0, 0.5, 0.5, 0.0], 1.0),
        (lambda text: "A", [0.5, 0.5, 0.5, 0.5], 0.0),
        (lambda text: "A" if ": best" in text else "C", [0.5, 0.5, 0.5, 0.5], 0.5),
    ],
)
def test_pairs_are_compared_in_both_positions(judge_settings: Make, says: Any, rewards: Any, agreement: float) -> None:
    counts = JudgeCounts()

    async def main() -> tuple[list[Verdict], int]:
        async with judge_server(says) as server:
            judge = Judge(judge_settings(server.url, mode="pairwise"), name="reward.judge", counts=counts)
            verdicts = await judge.compare(["best", "fair", "fine", "poor"], None, {})
            await judge.close()
            return verdicts, len(server.bodies)

    verdicts, num_asked = run_in_virtual_time(main())
    assert [verdict.reward for verdict in verdicts] == rewards
    assert num_asked == 12
    assert counts.take()["judge/swap_agreement"] == agreement


def test_rewards_of_a_group_do_not_depend_on_its_order_or_on_when_it_is_answered(judge_settings: Make) -> None:
    async def main(order: Any, settings: Any) -> dict[str, Any]:
        async def says(text: str) -> str:
            await asyncio.sleep(sum(map(ord, text[len(order[0]) :])) % 7)
            return better(text) if "Ranking" not in text else "Ranking: 1 > 2 > 3"

        async with judge_server(says) as server:
            judge = Judge(judge_settings(server.url, mode="pairwise", **settings), name="reward.judge")
            verdicts = await judge.compare(order, None, {})
            await judge.close()
            return {response: verdict.reward for response, verdict in zip(order, verdicts, strict=True)}

    for settings in ({}, {"swap_positions": False}, {"pair_scores": "bradley_terry"}):
        found = [run_in_virtual_time(main(order, settings)) for order in permutations(["best", "fair", "poor"])]
        assert all(each == pytest.approx(found[0], abs=1e-9) for each in found), settings
        assert found[0]["best"] > found[0]["fair"] > found[0]["poor"]


def test_equal_answers_are_one_and_tie(judge_settings: Make) -> None:
    async def main() -> tuple[list[Verdict], list[Verdict], int]:
        async with judge_server(better) as server:
            judge = Judge(judge_settings(server.url, mode="pairwise"), name="reward.judge")
            equal = await judge.compare(["fair"] * 8, None, {})
            mixed = await judge.compare(["best", "poor", "poor", "best"], None, {})
            await judge.close()
            return equal, mixed, len(server.bodies)

    equal, mixed, num_asked = run_in_virtual_time(main())
    assert [verdict.reward for verdict in equal] == [0.5] * 8
    assert [verdict.reward for verdict in mixed] == [5 / 6, 1 / 6, 1 / 6, 5 / 6]
    assert num_asked == 2


@pytest.mark.parametrize(
    ("pair_scores", "failed"), [("win_rate", {"fair", "poor"}), ("bradley_terry", {"best", "fair", "poor", "fine"})]
)
def test_a_pair_without_a_verdict_fails_those_whose_rewards_need_it(
    judge_settings: Make, pair_scores: str, failed: set[str]
) -> None:
    broken = True

    def says(text: str) -> str:
        return "hm" if broken and "fair" in text and "poor" in text else better(text)

    async def main() -> list[list[Verdict]]:
        nonlocal broken
        async with judge_server(says) as server:
            settings = judge_settings(server.url, mode="pairwise", pair_scores=pair_scores)
            judge = Judge(settings, name="reward.judge")
            first = await judge.compare(list(GOOD), None, {})
            num_asked, broken = len(server.bodies), False
            again = await judge.compare(list(GOOD), None, {})
            await judge.close()
            assert num_asked == 12
            assert len(server.bodies) <= 14
            return [first, again]

    first, again = run_in_virtual_time(main())
    assert {name for name, verdict in zip(GOOD, first, strict=True) if verdict.outcome is Outcome.ERROR} == failed
    assert all(verdict.outcome is Outcome.OK for verdict in again)
    assert all(one == other for one, other in zip(first, again, strict=True) if one.outcome is Outcome.OK)


def rank(text: str) -> str:
    """A judge of lists."""
    shown = [name for name in text.replace("\n", " ").split() if name in GOOD]
    by_goodness: dict[int, list[str]] = {}
    for number, name in enumerate(shown, start=1):
        by_goodness.setdefault(-GOOD[name], []).append(str(number))
    return "Ranking: " + " > ".join(" = ".join(by_goodness[key]) for key in sorted(by_goodness))


def in_order(text: str) -> str:
    """A judge that likes what it reads first."""
    return "Ranking: 1 > 2 > 3 > 4"


@pytest.mark.parametrize(
    ("says", "rewards"),
    [(rank, [1.0, 0.5, 0.5, 0.0]), (in_order, [0.5] * 4), (lambda text: "Ranking: 1 > 2", [None] * 4)],
)
def test_lists_are_ranked_in_an_order_and_its_reverse(judge_settings: Make, says: Any, rewards: Any) -> None:
    async def main() -> tuple[list[Verdict], int]:
        async with judge_server(says) as server:
            judge = Judge(judge_settings(server.url, mode="listwise"), name="reward.judge")
            verdicts = await judge.compare(["best", "fair", "fine", "poor"], None, {})
            await judge.close()
            return verdicts, len(server.bodies)

    verdicts, num_asked = run_in_virtual_time(main())
    assert [verdict.reward for verdict in verdicts] == rewards
    assert num_asked == 2


def test_answers_are_compared_with_the_label(judge_settings: Make) -> None:
    async def ask(label: Any) -> list[Any]:
        async with judge_server(better) as server:
            settings = judge_settings(server.url, mode="pairwise", opponent="label")
            judge = Judge(settings, name="reward.judge")
            assert not judge.compares_group
            verdicts = [await judge(response, label, {}) for response in ("best", "fair", "fine", "poor")]
            await judge.close()
            return [verdict.reward for verdict in verdicts]

    assert run_in_virtual_time(ask("fair")) == [1.0, 0.5, 0.5, 0.0]
    assert run_in_virtual_time(ask(None)) == [None] * 4


@pytest.mark.parametrize(("combine", "reward"), [("mean", 0.75), ("median", 1.0), ("min", 0.0)])
def test_a_panel_makes_one_score_of_several_and_tells_how_they_agree(
    judge_settings: Make, combine: str, reward: float
) -> None:
    counts = JudgeCounts()

    async def main() -> tuple[Verdict, Verdict]:
        says = iter(["good", "bad", "good", "good", "good", "bad", "good", "hm"])
        async with judge_server(lambda text: next(says)) as server:
            judges = [
                Judge(judge_settings(server.url, **LETTERS), name=f"reward.judges.{name}", counts=counts)
                for name in "abcd"
            ]
            panel = Panel(JudgeSettings(panel=("a", "b"), combine=combine), judges, counts=counts)
            verdicts = await panel("one", None, {}), await panel("two", None, {})
            for judge in judges:
                await judge.close()
            return verdicts

    agreed, failed = run_in_virtual_time(main())
    assert agreed.reward == reward
    assert counts.take()["judge/panel_agreement"] == 0.5
    assert "reward.judges.a gives " in agreed.detail
    assert (failed.reward, failed.outcome) == (None, Outcome.ERROR)


@pytest.mark.parametrize(
    ("says", "settings", "told"),
    [
        (
            replies({"status": 404, "text": "no such model"}),
            {},
            "reward.judge: the judge does not answer: .*no such model",
        ),
        (
            replies("A"),
            {"reply": "letter_logprobs", "choices": {"A": 1.0, "B": 0.0}},
            "judge at .* has no top_logprobs",
        ),
        (
            replies({"content": "A", "tops": [("A", {})]}),
            {"reply": "letter_logprobs", "choices": {"A": 1.0, "B": 0.0}},
            "has no top_logprobs",
        ),
    ],
)
def test_a_judge_that_cannot_do_it_is_refused_at_the_start(
    judge_settings: Make, says: Any, settings: Any, told: str
) -> None:
    async def main() -> None:
        async with judge_server(says) as server:
            judge = Judge(judge_settings(server.url, **settings), name="reward.judge")
            try:
                await judge.probe()
            finally:
                await judge.close()

    with pytest.raises(ConfigError, match=told):
        run_in_virtual_time(main())


def test_a_judge_that_can_do_it_is_asked_for_one_token(judge_settings: Make) -> None:
    async def main() -> Counter[int]:
        reply = {"content": "A", "finish": "length", "tops": [("A", {"A": 0.0})]}
        async with judge_server(replies(reply)) as server:
            settings = {"reply": "letter_logprobs", "choices": {"A": 1.0, "B": 0.0}}
            judge = Judge(judge_settings(server.url, **settings), name="reward.judge")
            await judge.probe()
            await judge.close()
            return Counter(body["max_tokens"] for body in server.bodies)

    assert run_in_virtual_time(main()) == {1: 1}
