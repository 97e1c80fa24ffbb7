"""The reward hub beside math-verify called directly in one process, on the same responses and labels.

math-verify parses and verifies one pair after the other, with its own time limits. Inputs that hang are calls which
never return: the hub hands them to a worker that it kills at the deadline; from math-verify they are left out, since
what holds the interpreter for ever would hold the whole process.

A judge's questions are measured beside the same requests sent by aiohttp alone, to a server that takes its time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

import aiohttp
from aiohttp import web

from rollfeed.app.rewards import RewardServices, open_reward_hub
from rollfeed.base.cores import num_cores
from rollfeed.base.loop_thread import LoopThread
from rollfeed.base.serving import serve_application
from rollfeed.config import JudgeSettings, RewardSettings, WorkerSettings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.registry import BUILTIN_GRADERS, BuiltinGrader
from rollfeed.types import Outcome, Verdict

GOAL_RATIO = 0.8
"""Of the hub's verdicts a second to cores times math-verify's."""
_HANGS = "hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWorkload:
    """Responses to grade, and how many of them hang."""

    num_inputs: int = 1_000
    hanging_shares: tuple[float, ...] = (0.0, 0.01, 0.05)
    deadline_seconds: float = 1.0
    """Of a call in a worker."""
    repetitions: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One response with its label."""

    response: str
    label: str


def bench_rewards(workload: RewardWorkload, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return JSON values. Raises ConfigError if math-verify is not installed."""
    pairs = make_pairs(workload)
    reference, right = [], 0
    shares: dict[float, list[tuple[float, list[Verdict]]]] = {share: [] for share in workload.hanging_shares}
    for repetition in range(workload.repetitions):
        seconds, right = _time_reference(pairs)
        reference.append(len(pairs) / seconds)
        progress(f"repetition {repetition + 1}: math-verify {reference[-1]:.0f} verdicts/s")
        for share, results in shares.items():
            results.append(asyncio.run(_time_hub(_with_hanging(pairs, share, workload.seed), workload)))
            progress(f"repetition {repetition + 1}: hub, {share:.0%} hanging: {len(pairs) / results[-1][0]:.0f}")
    clean = median(seconds for seconds, _ in shares[min(shares)])
    by_share = [_summary(share, results, clean, workload) for share, results in shares.items()]
    ratio = by_share[0]["verdicts_per_second"] / (num_cores() * median(reference))
    return {
        "workload": asdict(workload),
        "cores": num_cores(),
        "math_verify_verdicts_per_second": median(reference),
        "math_verify_right": right,
        "hub_right": sum(verdict.reward == 1.0 for verdict in shares[min(shares)][0][1]),
        "hub_ratio": ratio,
        "by_hanging_share": by_share,
        "hanging_inputs": "sleep for ever in a worker of the hub; left out for math-verify",
        "goals": {
            "hub_ratio": GOAL_RATIO,
            "met": ratio >= GOAL_RATIO
            and all(each["lost_seconds"] <= each["deadlines_seconds"] for each in by_share[1:]),
        },
    }


def make_pairs(workload: RewardWorkload) -> list[Pair]:
    """Return responses of a kind that policies write: half of them right, in other spellings than the label."""
    random = Random(workload.seed)
    return [_make_pair(random) for _ in range(workload.num_inputs)]


def _make_pair(random: Random) -> Pair:
    a, b, c = (random.randint(2, 99) for _ in range(3))
    spellings: Sequence[tuple[str, str]] = [
        (f"{a}{b:02}", f"{a}{b:02}.0"),
        (f"{a},{b:02}0".replace(",", "{,}", 1), f"{a}{b:02}0"),
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a * c}}}{{{b * c}}}"),
        (f"{a / 8}", rf"\frac{{{a}}}{{8}}"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
        (rf"x^2+{a + b}x+{a * b}", rf"(x+{a})(x+{b})"),
        (rf"\left({a},\frac{{{b}}}{{2}}\right)", f"({a}, {b / 2})"),
        (rf"[{a},\infty)", rf"\left[{a}, \infty\right)"),
        (rf"{a}\pi", rf"\pi \cdot {a}"),
        (rf"\{{{a}, {b}\}}", rf"\{{{b}, {a}\}}"),
        (rf"\frac{{1}}{{\sqrt{{{b}}}+1}}", rf"\frac{{\sqrt{{{b}}}-1}}{{{b}-1}}"),
    ]
    label, answer = random.choice(spellings)
    if random.random() < 0.5:
        answer = answer.replace(str(b), str(b + 1), 1).replace(str(a), str(a + 1), 1)
    return Pair(response=rf"Adding up what we have, the answer is $\boxed{{{answer}}}$.", label=label)


def _with_hanging(pairs: Sequence[Pair], share: float, seed: int) -> list[Pair]:
    chosen = set(Random(seed).sample(range(len(pairs)), round(share * len(pairs))))
    return [Pair(response=_HANGS, label=p.label) if number in chosen else p for number, p in enumerate(pairs)]


def _time_reference(pairs: Sequence[Pair]) -> tuple[float, int]:
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError:
        raise ConfigError("the reference is not installed: pip install math-verify") from None
    _ = verify(parse("$1$"), parse("$1$"))
    started = time.perf_counter()
    right = sum(bool(verify(parse(f"${pair.label}$"), parse(pair.response))) for pair in pairs)
    return time.perf_counter() - started, right


async def _time_hub(pairs: Sequence[Pair], workload: RewardWorkload) -> tuple[float, list[Verdict]]:
    settings = RewardSettings(workers=WorkerSettings(timeout_seconds=workload.deadline_seconds))
    services = RewardServices(settings, rm_types=["math"])
    hub = RewardHub(
        graders={"math": BuiltinGrader("math", _grade)},
        rm_type="math",
        timeout_seconds=workload.deadline_seconds,
        workers=services.workers,
        worker_timeout_seconds=workload.deadline_seconds,
    )
    async with services:
        await services.workers.start()
        started = time.perf_counter()
        verdicts = await asyncio.gather(*(hub.grade(pair.response, pair.label) for pair in pairs))
        return time.perf_counter() - started, verdicts


def _grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    if response == _HANGS:
        return IsolatedCall("time.sleep", (1e6,), lambda _: Verdict(reward=0.0))
    return BUILTIN_GRADERS["math"].grade(response, label, metadata)


def _summary(
    share: float, results: Sequence[tuple[float, list[Verdict]]], clean: float, workload: RewardWorkload
) -> dict[str, Any]:
    """Return the hub's figures with a share of hanging inputs; the most that may be lost are their deadlines."""
    seconds = median(each for each, _ in results)
    num_hanging = round(share * workload.num_inputs)
    return {
        "hanging_share": share,
        "num_hanging": num_hanging,
        "seconds": seconds,
        "verdicts_per_second": workload.num_inputs / seconds,
        "lost_seconds": max(0.0, seconds - clean),
        "deadlines_seconds": num_hanging * workload.deadline_seconds,
        "num_timeouts": sum(verdict.outcome is Outcome.TIMEOUT for verdict in results[0][1]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeWorkload:
    """Questions to a judge, all at once."""

    num_calls: int = 256
    call_seconds: float = 0.25
    """Taken by the server for each."""
    repetitions: int = 3


class _SlowJudge:
    """A chat endpoint that says the same of everything, after a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._num_running = 0
        self.most_running = 0

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self._num_running += 1
        self.most_running = max(self.most_running, self._num_running)
        await asyncio.sleep(self._seconds)
        self._num_running -= 1
        message = {"role": "assistant", "content": "Score: 7"}
        usage = {"prompt_tokens": 100, "completion_tokens": 4}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        application = web.Application()
        application.add_routes([web.post("/v1/chat/completions", self.answer)])
        async with serve_application(application, host="127.0.0.1", port=0) as address:
            yield f"{address}/v1"


def bench_judge(workload: JudgeWorkload, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return JSON values: seconds of all calls together, and how many the server had at once."""
    judge, thread, entered = _SlowJudge(workload.call_seconds), LoopThread("judge"), AsyncExitStack()
    hub_seconds, reference_seconds, most_running = [], [], []
    try:
        url = thread.call(entered.enter_async_context(judge.serving()))
        for repetition in range(workload.repetitions):
            reference_seconds.append(asyncio.run(_time_requests(url, workload)))
            judge.most_running = 0
            hub_seconds.append(asyncio.run(_time_judge(url, workload)))
            most_running.append(judge.most_running)
            progress(f"repetition {repetition + 1}: {hub_seconds[-1]:.3f} s, {most_running[-1]} calls at once")
    finally:
        thread.call(entered.aclose())
        thread.close()
    return {
        "workload": asdict(workload),
        "seconds": median(hub_seconds),
        "reference_seconds": median(reference_seconds),
        "over_call_seconds": median(hub_seconds) - workload.call_seconds,
        "most_calls_at_once": min(most_running),
        "passed": min(most_running) == workload.num_calls,
    }


async def _time_judge(url: str, workload: JudgeWorkload) -> float:
    judge = JudgeSettings(servers=(url,), model="judge", rubric="{prompt} {response}")
    async with open_reward_hub(RewardSettings(rm_type="judge", judge=judge)) as hub:
        started = time.perf_counter()
        grading = (hub.grade(f"answer {number}", None, prompt="?") for number in range(workload.num_calls))
        verdicts = await asyncio.gather(*grading)
        seconds = time.perf_counter() - started
    if any(verdict.reward != 7.0 for verdict in verdicts):
        raise RunFailedError(f"a call failed: {next(each.detail for each in verdicts if each.reward != 7.0)}")
    return seconds


async def _time_requests(url: str, workload: JudgeWorkload) -> float:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(number: int) -> None:
            body = {"model": "judge", "messages": [{"role": "user", "content": f"? answer {number}"}]}
            async with session.post(f"{url}/chat/completions", json=body) as reply:
                await reply.json()

        started = time.perf_counter()
        await asyncio.gather(*map(post, range(workload.num_calls)))
        return time.perf_counter() - started
