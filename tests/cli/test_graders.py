from __future__ import annotations

import json

import pytest

from rollfeed.app.rewards import RewardServices
from rollfeed.cli.graders import _EXAMPLES
from rollfeed.cli.main import main
from rollfeed.config import RewardSettings
from rollfeed.rewards.registry import BUILTIN_GRADERS


def test_every_grader_has_an_example() -> None:
    assert _EXAMPLES.keys() == RewardServices(RewardSettings(), rm_types=[]).graders().keys()
    assert {name for name, each in _EXAMPLES.items() if each.is_graded} == BUILTIN_GRADERS.keys()


def test_examples_are_graded_as_they_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graders", "--json"]) == 0
    rewards = {each["rm_type"]: each["reward"] for each in json.loads(capsys.readouterr().out)}
    assert rewards.pop("random") in (0.0, 1.0)
    assert (rewards.pop("f1"), rewards.pop("ifeval")) == (0.5, 0.0)
    assert {name for name, reward in rewards.items() if reward == 1.0} == BUILTIN_GRADERS.keys() - {
        *("random", "f1", "ifeval")
    }
    assert main(["graders", "math"]) == 0
    assert capsys.readouterr().out.endswith('label "1/2", response "So it is \\\\boxed{0.5}."  -> 1\n')


def test_an_unknown_grader_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graders", "mth"]) == 2
    assert capsys.readouterr().err == "rollfeed: grader 'mth': no such grader; did you mean math?\n"
