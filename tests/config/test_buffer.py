import pytest
from pydantic import ValidationError

from rollfeed.config import BufferPolicyName, BufferSettings, PlacementSettings


def test_a_policy_is_chosen_by_name() -> None:
    assert BufferSettings().policy is BufferPolicyName.FIFO
    assert BufferSettings.model_validate({"policy": "max_staleness"}).policy is BufferPolicyName.MAX_STALENESS
    with pytest.raises(ValidationError, match="'fifo', 'freshest' or 'max_staleness'"):
        BufferSettings.model_validate({"policy": "lifo"})


def test_placement_is_off_unless_asked_for() -> None:
    assert (PlacementSettings().long_first, PlacementSettings().tail_batching) == (False, False)
