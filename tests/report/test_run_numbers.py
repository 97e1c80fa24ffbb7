"""The numbers of a run that goes on, as Prometheus reads them."""

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollfeed.base.serving import prometheus_text
from rollfeed.errors import ConfigError
from rollfeed.report import RunNumbers, check_port
from rollfeed.testing import make_group
from rollfeed.types import Drop, Keep


def read(numbers: RunNumbers) -> dict[tuple[str, str], float]:
    """Return samples by name and the value of their label, read as Prometheus does."""
    families = text_string_to_metric_families(prometheus_text(numbers.families()).decode())
    samples = [sample for family in families for sample in family.samples]
    found = {(each.name, ",".join(each.labels.values())): each.value for each in samples}
    assert len(found) == len(samples)
    found.pop(("rollfeed_last_metrics_timestamp_seconds", ""), None)
    return found


def test_what_a_run_names_itself_is_a_label() -> None:
    numbers = RunNumbers()
    metrics = {
        "rollout/reward_mean": 0.5,
        "rollout/wasted_tokens/stale": 3.0,
        "rollout/dynamic_filter/drop_zero std: 0.0": 2.0,
        "sources/core/add@1/reward_mean": 1.0,
        'sources/a "b"\n/reward_mean': 0.25,
        "mine": math.nan,
        "eval/set/pass@2": 1.0,
        "eval/set/pass^2": 0.5,
        "own/a b": 1.0,
        "own/a-b": 0.5,
    }
    numbers.log(metrics, step=4, kind="step")
    found = read(numbers)
    assert math.isnan(found.pop(("rollfeed_mine", "")))
    assert found == {
        ("rollfeed_last_step", ""): 4.0,
        ("rollfeed_rollout_reward_mean", ""): 0.5,
        ("rollfeed_rollout_wasted_tokens", "stale"): 3.0,
        ("rollfeed_rollout_dynamic_filter", "drop_zero std: 0.0"): 2.0,
        ("rollfeed_sources_reward_mean", "core/add@1"): 1.0,
        ("rollfeed_sources_reward_mean", 'a "b"\n'): 0.25,
        ("rollfeed_eval_pass_at_2", "set"): 1.0,
        ("rollfeed_eval_pass_hat_2", "set"): 0.5,
        # Of two names that Prometheus cannot tell apart the later is there.
        ("rollfeed_own_a_b", ""): 0.5,
    }


def test_what_a_later_step_has_not_is_gone_and_updates_stay() -> None:
    numbers = RunNumbers()
    numbers.log({"rollout/dynamic_filter/drop_x": 1.0, "rollout/reward_mean": 0.0}, step=0, kind="step")
    numbers.log({"train/loss": 0.1}, step=0, kind="train")
    numbers.log({"rollout/reward_mean": 1.0}, step=1, kind="step")
    assert read(numbers) == {
        ("rollfeed_last_step", ""): 1.0,
        ("rollfeed_rollout_reward_mean", ""): 1.0,
        ("rollfeed_train_loss", ""): 0.1,
    }


def test_counts_grow_while_a_step_is_made() -> None:
    numbers, group = RunNumbers(), make_group([0.0, 1.0])
    numbers.step_started(7)
    for decision in (Keep(), Drop("equal")):
        numbers.group_submitted(group)
        for rollout in group.rollouts:
            numbers.rollout_finished(rollout)
        numbers.group_decided(replace(group), decision)
    numbers.waiting("for nothing")
    assert read(numbers) == {
        ("rollfeed_step", ""): 7.0,
        ("rollfeed_groups_total", "submitted"): 2.0,
        ("rollfeed_groups_total", "kept"): 1.0,
        ("rollfeed_groups_total", "dropped"): 1.0,
        ("rollfeed_rollouts_total", ""): 4.0,
        ("rollfeed_response_tokens_total", ""): 2.0 * group.response_tokens,
        ("rollfeed_waiting_messages_total", ""): 1.0,
    }


def test_a_host_that_does_not_exist_is_told() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.port = 0: cannot listen on no\.such\.host\.invalid:0"):
        check_port("no.such.host.invalid", 0)
