from typing import Any

import pytest
from pydantic import ValidationError

from rollfeed.config import RolloutConfig, RolloutSettings, Settings, validate_settings

PROMPTS = {"environments": [{"id": "core/copy_text"}]}


def settings_of(**rollout: Any) -> Settings:
    return validate_settings({"prompts": PROMPTS, "rollout": rollout}, where="test")


@pytest.mark.parametrize(("mode", "limit"), [("sync", 0), ("partial", None), ("async", 4)])
def test_how_stale_a_batch_may_be_depends_on_the_mode(mode: str, limit: int | None) -> None:
    assert RolloutSettings(mode=mode).max_staleness == limit
    assert RolloutConfig(mode=mode, max_staleness=7).max_staleness == 7
    stored = settings_of(mode=mode).model_dump(mode="json")
    assert stored["rollout"]["max_staleness"] == limit
    assert RolloutConfig(**RolloutSettings(mode=mode).model_dump()).max_staleness == limit


def test_synchronous_rollouts_are_on_policy_by_default() -> None:
    assert RolloutSettings().max_staleness == Settings(prompts=settings_of().prompts).rollout.max_staleness == 0


def test_settings_that_were_stored_with_a_limit_keep_it() -> None:
    stored = settings_of().model_dump(mode="json")
    stored["rollout"]["max_staleness"] = 4
    del stored["rollout"]["mask_offpolicy_finished_members"]
    again = validate_settings(stored, where="stored")
    assert (again.rollout.mode, again.rollout.max_staleness) == ("sync", 4)


def test_a_stored_asynchronous_run_and_its_file_agree() -> None:
    stored = settings_of(mode="async", max_staleness=4)
    assert stored.identity() == settings_of(mode="async").identity()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "async", "max_staleness": None}, "paced by max_staleness: set a number"),
        ({"mask_offpolicy_finished_members": True}, "set that to true as well"),
        ({"max_staleness": -1}, "greater than or equal to 0"),
        ({"mode": ["sync"]}, "Input should be 'sync', 'partial' or 'async'"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RolloutSettings(**values)
