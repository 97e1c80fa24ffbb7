from __future__ import annotations

from typing import Any

import pytest

from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError

PROMPTS = {"environments": [{"id": "core/copy_text"}]}
LOCAL, SERVED = {"checkpoint": "somewhere"}, {"servers": ["http://a:1"]}


@pytest.mark.parametrize(
    ("teacher", "others", "message"),
    [
        ({}, {}, "there is to be one teacher: give checkpoint, or servers"),
        ({**LOCAL, **SERVED}, {}, "one of checkpoint and servers"),
        ({**LOCAL, "use": "reward", "advantage_weight": 1}, {}, "advantage_weight has no effect with use = 'reward'"),
        ({"servers": ["http://a:1", "http://a:1"]}, {}, "an address is given twice"),
        ({**LOCAL, "device": "gpu"}, {}, "'gpu' is not a device"),
        (
            SERVED,
            {"sampling": {"rollout_temperature": 0.7}},
            r"sampling.rollout_temperature = 0.7: teacher.servers tell",
        ),
        ({**SERVED, "temperature": 0.5}, {}, r"teacher.temperature = 0.5: teacher.servers tell"),
        (LOCAL, {"sampling": {"rollout_top_p": 0.9}}, r"rollout_top_p = 0.9: policy and teacher are compared over"),
        (
            LOCAL,
            {"sampling": {"rollout_top_k": 9, "return_sampling_mask": True}},
            "return_sampling_mask = true: policy and teacher are compared",
        ),
        ({**LOCAL, "use": "reward"}, {"plugins": {"reward": "m:f"}}, "'reward' replaces the reward functions"),
        (
            LOCAL,
            {"plugins": {"advantage": "m:f"}},
            r"plugins.advantage has no effect with teacher.advantage_weight = 0",
        ),
        (LOCAL, {"rollout": {"mode": "sft"}}, r"teacher.checkpoint has no effect with rollout.mode = 'sft'"),
    ],
)
def test_settings_of_a_teacher_that_do_not_go_together_are_refused(
    teacher: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    prompts = {"datasets": [{"path": "x.jsonl"}]} if "rollout" in others else PROMPTS
    with pytest.raises(ConfigError, match=message):
        validate_settings({"prompts": prompts, "teacher": teacher, **others}, where="test")


def test_a_policy_at_a_temperature_may_follow_servers_at_one_where_that_is_said() -> None:
    others = {"prompts": PROMPTS, "sampling": {"rollout_temperature": 0.7}}
    settings = validate_settings({"teacher": {**SERVED, "temperature": 1}, **others}, where="test")
    assert settings.teacher is not None
    assert settings.teacher.temperature == 1.0
    assert validate_settings({"teacher": LOCAL, **others}, where="test").teacher is not None
