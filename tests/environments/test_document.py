"""The environment that docs/environments.md shows is one."""

from pathlib import Path
from typing import Any

from rollfeed.environments import HasGuessRate
from rollfeed.testing import check_environment


def test_environment_of_the_document_keeps_the_contract() -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    environment = names["Doubles"]()
    check_environment(environment)
    assert isinstance(environment, HasGuessRate)
    assert len(code.splitlines()) <= 20
