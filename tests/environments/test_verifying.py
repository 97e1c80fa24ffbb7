from __future__ import annotations

from random import Random
from typing import Any

import pytest

from rollfeed.environments import EnvironmentRegistry, verifying
from rollfeed.environments.verifying import verifier_path, verify_problem
from rollfeed.errors import ConfigError, RewardError
from rollfeed.types import Correct


def test_path_of_a_verifier_leads_to_it() -> None:
    module, _, name = verifier_path("core/add_numbers").partition(":")
    assert module == verifying.__name__
    verify = getattr(verifying, name)
    assert verify({"version": None, "params": {"terms": [2, 3]}}, "5").correct is Correct.YES


def test_path_of_no_environment_says_which_is_near() -> None:
    with pytest.raises(ConfigError, match="did you mean core/add_numbers"):
        getattr(verifying, "core/add_number")
    assert not hasattr(verifying, "no_such_name")


@pytest.mark.parametrize("environment_id", EnvironmentRegistry(find_entry_points=lambda: []).ids())
def test_level_and_seed_stand_for_the_parameters(environment_id: str) -> None:
    environment = EnvironmentRegistry().get(environment_id)
    _, params, answer = environment.make(2, Random(11))
    given = {"version": environment.version, "params": params}
    remade = {"version": environment.version, "level": 2, "seed": 11}
    for response in (str(answer), "no idea", ""):
        assert verify_problem(environment, given, response) == verify_problem(environment, remade, response)
    assert verify_problem(environment, remade, str(answer)).correct is Correct.YES


@pytest.mark.parametrize(
    ("level", "detail"), [(4, "its levels are 0 to 3"), (-1, "its levels are 0 to 3")], ids=["over", "under"]
)
def test_level_that_does_not_exist_is_refused(parity: Any, level: int, detail: str) -> None:
    parity.max_level = 3
    with pytest.raises(RewardError, match=detail):
        verify_problem(parity, {"version": 3, "level": level, "seed": 1}, "odd")


def test_generator_that_raises_is_named(parity: Any) -> None:
    class Broken(type(parity)):  # type: ignore[misc]
        def make(self, level: int, random: Any) -> Any:
            raise OSError("no dice")

    with pytest.raises(RewardError, match="my/parity: make raised OSError: no dice"):
        verify_problem(Broken(), {"version": 3, "level": 0, "seed": 1}, "odd")
