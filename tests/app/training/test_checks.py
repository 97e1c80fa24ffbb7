"""What is refused before there is a batch."""

import pytest

from rollfeed.app import check_training
from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError


def settings(**sections):
    environment = {"prompts": {"environments": [{"id": "core/copy_text"}]}}
    return validate_settings({**environment, **sections}, where="test", overrides=())


def test_an_advantage_function_that_would_not_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leave_one_out.*plugins\.advantage = 'mine:advantage': remove one of them"):
        check_training(settings(train={"advantage": "leave_one_out"}, plugins={"advantage": "mine:advantage"}))


def test_an_advantage_function_that_is_asked_is_not() -> None:
    check_training(settings(plugins={"advantage": "mine:advantage"}))
