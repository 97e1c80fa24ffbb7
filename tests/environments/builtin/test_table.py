"""The table of docs/environments.md says what the built-in environments are."""

from pathlib import Path

from rollfeed.environments import HasGuessRate
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS

DOCUMENT = Path(__file__).parents[3] / "docs" / "environments.md"


def test_table_has_every_built_in_environment_with_its_levels_and_guess_rates() -> None:
    rows = [
        line.split("|") for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `core/")
    ]
    told = [(row[1].strip(" `"), row[2].strip(), row[5].strip()) for row in rows]
    expected = []
    for environment in sorted(BUILTIN_ENVIRONMENTS, key=lambda each: each.environment_id):
        assert isinstance(environment, HasGuessRate)
        assert environment.max_level is not None
        first, last = (100 * environment.guess_rate(level)[1] for level in (0, environment.max_level))
        expected.append((environment.environment_id, f"0-{environment.max_level}", f"{first:.0f}-{last:.0f} %"))
    assert told == expected
