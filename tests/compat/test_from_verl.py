import re
from pathlib import Path

from rollfeed.config import Settings
from rollfeed.config.section import Section, section_in

PAGE = Path(__file__).parents[2] / "docs" / "from-verl.md"


def is_setting(key: str) -> bool:
    section: type[Section] | None = Settings
    for part in key.split("."):
        if section is None or part not in section.model_fields:
            return False
        section = section_in(section.model_fields[part].annotation)
    return True


def test_the_page_for_users_of_verl_names_settings_that_there_are() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([a-z_0-9.]+)`", row[1])]
    assert len(rows) > 60
    assert [name for name in named if not is_setting(name)] == []
