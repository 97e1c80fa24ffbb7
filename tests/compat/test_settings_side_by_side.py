import re
from pathlib import Path

import pytest
from tests.compat.setting_keys import is_setting

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize((("page", "least")), [("from-verl.md", 60), ("from-prime-rl.md", 50)])
def test_pages_for_users_of_others_name_settings_that_there_are(page: str, least: int) -> None:
    rows = [line.split("|")[1:-1] for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([a-z_0-9.]+)`", row[1])]
    assert len(rows) > least
    assert [name for name in named if not is_setting(name)] == []
    assert {len(row) for row in rows} == {3}
