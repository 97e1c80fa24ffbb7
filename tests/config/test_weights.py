import pytest
from pydantic import ValidationError

from rollfeed.config import WeightSettings, WeightSource


def test_a_folder_is_watched_when_source_says_so() -> None:
    settings = WeightSettings.model_validate({"source": "directory", "directory": "weights", "poll_seconds": 2})
    assert settings.source is WeightSource.DIRECTORY
    assert settings.poll_seconds == 2.0
    assert WeightSettings().source is WeightSource.NONE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"source": "directory"}, "set weights.directory"),
        ({"directory": "weights"}, "set weights.source = 'directory'"),
        ({"source": "directory", "directory": ""}, "at least 1 character"),
        ({"poll_seconds": 0.0}, "greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WeightSettings.model_validate(given)
