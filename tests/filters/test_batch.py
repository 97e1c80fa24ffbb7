import numpy as np
import pytest

from rollfeed.errors import ConfigError
from rollfeed.filters import build_batch_filter
from rollfeed.testing import group_of, make_prompt
from rollfeed.types import Group


@pytest.fixture
def make_group(make_sample):
    def make(group_index: int, rewards: list[float], lengths: list[int] | None = None) -> Group:
        samples = [
            make_sample(index, reward=reward, length=length)
            for index, (reward, length) in enumerate(zip(rewards, lengths or [3] * len(rewards), strict=True))
        ]
        prompt = make_prompt("", prompt_id=f"p/{group_index}", token_ids=np.arange(2, dtype=np.int32))
        return group_of(samples, prompt=prompt)

    return make


def test_the_widest_spread_of_rewards_comes_first_and_equal_ones_stay_in_order(make_group) -> None:
    groups = [make_group(0, [1, 1]), make_group(1, [0, 1]), make_group(2, [0, 4]), make_group(3, [3, 3])]
    assert build_batch_filter("reward_std", {}, reward_key=None)(groups) == [2, 1, 0, 3]


def test_lengths_near_the_mean_come_first(make_group) -> None:
    groups = [make_group(0, [0, 0], [1, 1]), make_group(1, [0, 0], [5, 7]), make_group(2, [0, 0], [20, 20])]
    assert build_batch_filter("length_balance", {}, reward_key=None)(groups) == [1, 0, 2]


@pytest.mark.parametrize(("name", "parameters"), [("reward_sdt", {}), ("reward_std", {"tolerance": 1})])
def test_an_unknown_name_or_parameter_is_refused(name: str, parameters: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        build_batch_filter(name, parameters, reward_key=None)
