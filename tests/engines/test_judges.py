"""A judge that a real vLLM serves on the CPU: letters, their probabilities, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engines.faults import broken, busy_once, cut, faulty, hang, nonsense
from tests.engines.servers import RealServer, vllm_server

from rollfeed.config import JudgeSettings
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.errors import ConfigError
from rollfeed.rewards.judging import Judge, JudgeCounts
from rollfeed.types import Outcome, Verdict

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TEXTS = [
    f"{word} saw {number} {thing}."
    for word in ("Anna", "Ben")
    for number in ("3", "no", "17", "many")
    for thing in ("cats", "cars")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    calls = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with vllm_server(resolve_checkpoint(DEFAULT_MODEL), tmp_path_factory.mktemp("vllm"), *calls) as running:
        yield running


def judged(server: RealServer, *, fault: Any = None, **settings: Any) -> tuple[list[Verdict], dict[str, float]]:
    """Return the verdicts on all texts, with a fault on the way to the server of those about Anna, and the metrics."""
    counts = JudgeCounts()

    async def main() -> list[Verdict]:
        async with faulty(server.address, fault, injures=lambda body: b"Anna" in body and fault) as (_, address):
            return await ask(address)

    async def ask(address: str) -> list[Verdict]:
        given = {
            "servers": [f"{address}/v1"],
            "model": "policy",
            "rubric": "Text: {response}\n\nDoes the text contain a number?",
            "choices": {"yes": 1.0, "no": 0.0},
            "max_tokens": 16,
            "timeout_seconds": 600.0,
        }
        judge = Judge(JudgeSettings.model_validate(given | settings), name="reward.judge", counts=counts)
        try:
            await judge.probe()
            counts.take()
            return list(await asyncio.gather(*(judge(text, None, {}) for text in TEXTS)))
        finally:
            await judge.close()

    return asyncio.run(main()), counts.take()


def test_letters_are_weighted_by_their_probabilities(server: RealServer) -> None:
    verdicts, metrics = judged(server, reply="letter_logprobs")
    scored = [verdict.reward for verdict in verdicts if verdict.outcome is Outcome.OK]
    assert scored
    assert all(isinstance(reward, float) and 0.0 < reward < 1.0 for reward in scored)
    assert metrics["judge/error_unreadable"] == len(TEXTS) - len(scored)
    assert metrics["judge/calls"] == len(TEXTS)
    again, _ = judged(server, reply="letter_logprobs")
    assert [verdict.outcome for verdict in again] == [verdict.outcome for verdict in verdicts]
    assert [v.reward for v in again if v.outcome is Outcome.OK] == pytest.approx(scored, abs=1e-3)


def test_letters_are_read_or_refused_and_all_is_counted(server: RealServer) -> None:
    verdicts, metrics = judged(server, reply="letter", prompt_price=1e6, completion_price=1e6)
    num_scored = sum(verdict.outcome is Outcome.OK for verdict in verdicts)
    assert {verdict.reward for verdict in verdicts} <= {0.0, 1.0, None}
    assert num_scored
    assert metrics["judge/error_unreadable"] == len(TEXTS) - num_scored
    assert metrics["judge/prompt_tokens"] > len(TEXTS)
    assert metrics["judge/cost"] == metrics["judge/prompt_tokens"] + metrics["judge/completion_tokens"]


def test_choices_can_be_forced_by_what_the_server_takes_besides(server: RealServer) -> None:
    forced = {"structured_outputs": {"choice": ["yes", "no"]}}
    verdicts, metrics = judged(server, reply="letter", extra_body=forced)
    assert {verdict.reward for verdict in verdicts} <= {0.0, 1.0}
    assert metrics["judge/error_unreadable"] == 0.0


def test_a_call_has_a_score_of_its_schema_or_none(server: RealServer) -> None:
    verdicts, metrics = judged(server, reply="tool", max_tokens=48)
    assert {verdict.reward for verdict in verdicts} <= {0.0, 1.0, None}
    assert metrics["judge/error_unreadable"] == sum(verdict.reward is None for verdict in verdicts)
    assert metrics["judge/error_http"] == 0.0


def test_a_model_that_is_not_served_is_refused_at_the_start(server: RealServer) -> None:
    with pytest.raises(ConfigError, match=r"reward\.judge: the judge does not answer: .*HTTP 404"):
        judged(server, reply="letter", model="another")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(hang, "timeout"), (cut, "connection"), (nonsense, "unreadable"), (broken, "http"), (busy_once, None)],
)
def test_faults_on_the_way_are_counted_and_cost_other_texts_nothing(
    server: RealServer, fault: Any, kind: str | None
) -> None:
    about: dict[str, Any] = {"reply": "letter", "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}
    whole, _ = judged(server, **about)
    tries = {"max_tries": 1, "timeout_seconds": 20.0} if kind else {}
    found, metrics = judged(server, fault=fault, **about, **tries)
    for text, before, after in zip(TEXTS, whole, found, strict=True):
        if kind and text.startswith("Anna"):
            assert after.reward is None
            assert after.outcome is (Outcome.TIMEOUT if fault is hang else Outcome.ERROR)
        else:
            assert after.reward == before.reward
    failures = {name: value for name, value in metrics.items() if name.startswith("judge/error_") and value}
    assert failures == ({f"judge/error_{kind}": 8.0} if kind else {})
    assert (metrics["judge/retries"] > 0) is (kind is None)
