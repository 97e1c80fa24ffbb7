import pytest

from rollfeed.environments import EnvironmentRegistry
from rollfeed.testing import check_environment


@pytest.mark.parametrize("environment_id", [each for each in EnvironmentRegistry().ids() if each.startswith("core/")])
def test_built_in_environments_keep_the_contract(environment_id: str) -> None:
    check_environment(EnvironmentRegistry().get(environment_id), levels=range(10), seeds=range(20))
