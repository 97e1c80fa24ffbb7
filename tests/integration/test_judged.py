"""The example of a judged run, with the served built-in model as the judge."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_sglang_engine import address_of

from rollfeed.store import RunReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "judged" / "judged.toml"
SERVE = ("serve", "engine", "--port", "0", "--threads", "1", "--num-slots", "8", "--context-length", "384")
SMALL = {"num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2}


@pytest.fixture(scope="module")
def judge(fork_rollfeed: Callable[..., Any]) -> Iterator[str]:
    """The address of the judge, as an override."""
    process = fork_rollfeed(*SERVE)
    try:
        yield f"reward.judge.servers={json.dumps([address_of(process) + '/v1'])}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.close()


def test_the_example_makes_a_batch_that_was_judged(rollfeed: Any, judge: str, tmp_path: Path) -> None:
    overrides = [f"rollout.{name}={value}" for name, value in SMALL.items()]
    overrides += [judge, "sampling.rollout_max_response_len=12", "engine.num_slots=8"]
    options = [word for each in overrides for word in ("--set", each)]
    ran = rollfeed("run", EXAMPLE, "--out", tmp_path / "run", *options)
    assert ran.code == 0, ran.err
    batch = RunReader(tmp_path / "run").batch(0)
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    assert {sample.reward for sample in batch.samples} <= {0.0, 1.0}
    for rollout in rollouts:
        assert rollout.verdict is not None
        name, said = rollout.verdict.detail.split("): ")
        assert name.startswith("smollm2-135m-instruct (")
        assert said.lower().startswith("yes" if rollout.get_reward_value() else "no")
    assert batch.metrics["judge/calls"] + batch.metrics["judge/cache_hits"] >= len(rollouts)
    assert batch.metrics["judge/prompt_tokens"] > 0.0
    shown = rollfeed("show", tmp_path / "run", "--group", str(batch.groups[0].group_index))
    assert "detail: smollm2-135m-instruct (" in shown.out


def test_letters_are_weighted_by_what_the_served_engine_says_of_them(rollfeed: Any, judge: str, tmp_path: Path) -> None:
    overrides = [f"rollout.{name}={value}" for name, value in SMALL.items()]
    overrides += [judge, "reward.judge.reply=letter_logprobs", "sampling.rollout_max_response_len=12"]
    options = [word for each in (*overrides, "engine.num_slots=8") for word in ("--set", each)]
    ran = rollfeed("check", EXAMPLE, "--servers", *options)
    assert ran.code == 0, ran.err
    assert "judge    judge answers" in ran.out
    ran = rollfeed("run", EXAMPLE, "--out", tmp_path / "run", *options)
    assert ran.code == 0, ran.err
    for group in RunReader(tmp_path / "run").batch(0).groups:
        for rollout in group.rollouts:
            assert rollout.verdict is not None
            reward, said = rollout.get_reward_value(), rollout.verdict.detail.split("): ")[1].lower()
            assert 0.0 < reward < 1.0
            assert said.startswith("yes") if reward > 0.5 else not said.startswith("yes")
