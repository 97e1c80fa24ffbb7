"""The package's own page and data: what is shown where there is no repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")


def test_the_page_needs_no_file_of_the_repository() -> None:
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", PAGE)
    assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []
    assert not re.search(r"^rollfeed .*(examples|docs)/|\.venv", PAGE, re.MULTILINE)


def test_the_page_names_the_extras_and_templates_that_there_are() -> None:
    extras = set(re.findall(r"rollfeed\[([\w-]+)\]", PAGE))
    assert extras == set(PROJECT["optional-dependencies"]) - {"dev"}
    templates = {path.name for path in (ROOT / "src" / "rollfeed" / "cli" / "templates").iterdir()}
    assert {name for name in re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE) if name != "rollfeed"} == templates
