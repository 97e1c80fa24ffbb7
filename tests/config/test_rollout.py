from typing import Any

import pytest
from pydantic import ValidationError

from rollfeed.config import RolloutSettings, Settings, read_stored, stored_identity, validate_settings

PROMPTS = {"environments": [{"id": "core/copy_text"}]}


def settings_of(**rollout: Any) -> Settings:
    return validate_settings({"prompts": PROMPTS, "rollout": rollout}, where="test")


@pytest.mark.parametrize(("mode", "limit"), [("sync", 0), ("partial", None), ("async", 4)])
def test_how_stale_a_batch_may_be_depends_on_the_mode(mode: str, limit: int | None) -> None:
    assert RolloutSettings(mode=mode).max_staleness == limit
    assert RolloutSettings(mode=mode, max_staleness=7).max_staleness == 7
    stored = settings_of(mode=mode).model_dump(mode="json")
    assert stored["rollout"]["max_staleness"] == limit
    assert RolloutSettings(**RolloutSettings(mode=mode).model_dump()).max_staleness == limit


def test_synchronous_rollouts_are_on_policy_by_default() -> None:
    assert RolloutSettings().max_staleness == Settings(prompts=settings_of().prompts).rollout.max_staleness == 0


def stored_before(mode: str, max_staleness: int) -> dict[str, Any]:
    """Return settings as they were stored when only asynchronous runs had a limit."""
    stored = settings_of(mode=mode, max_staleness=max_staleness).model_dump(mode="json")
    del stored["rollout"]["mask_offpolicy_finished_members"]
    return stored


@pytest.mark.parametrize(("mode", "limit"), [("sync", 0), ("partial", None), ("async", 4)])
def test_runs_of_before_can_be_gone_on_with(mode: str, limit: int | None) -> None:
    stored = stored_before(mode, 4)
    assert read_stored(stored, where="stored").rollout.max_staleness == limit
    assert stored_identity(stored) == settings_of(mode=mode).identity()


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_runs_of_before_keep_the_correction_they_had(mode: str) -> None:
    """Before, none was the default in every mode; what a file leaves out now differs from it, and is named."""
    stored = settings_of(mode=mode).model_dump(mode="json")
    stored["train"]["loss"]["correction"] = "none"
    assert read_stored(stored, where="stored").train.loss.correction == "none"
    there, here = stored_identity(stored), settings_of(mode=mode).identity()
    assert there is not None
    differing = {key for key in here if here[key] != there[key]}
    assert differing == (set() if mode == "sync" else {"train.loss.correction"})


def test_a_limit_that_was_set_is_kept() -> None:
    assert read_stored(stored_before("partial", 2), where="stored").rollout.max_staleness == 2
    stored = settings_of(max_staleness=4).model_dump(mode="json")
    assert read_stored(stored, where="stored").rollout.max_staleness == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "async", "max_staleness": None}, "paced by max_staleness: set a number"),
        ({"mask_offpolicy_finished_members": True}, "set that to true as well"),
        ({"max_staleness": -1}, "greater than or equal to 0"),
        ({"mode": ["sync"]}, "Input should be 'sync', 'partial', 'async' or 'sft'"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RolloutSettings(**values)
