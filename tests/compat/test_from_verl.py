import re
from pathlib import Path

from tests.compat.setting_keys import is_setting

PAGE = Path(__file__).parents[2] / "docs" / "from-verl.md"


def test_the_page_for_users_of_verl_names_settings_that_there_are() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([a-z_0-9.]+)`", row[1])]
    assert len(rows) > 60
    assert [name for name in named if not is_setting(name)] == []
