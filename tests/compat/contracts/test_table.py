import re
from pathlib import Path


def test_every_test_that_the_table_names_is_there() -> None:
    here = Path(__file__).parent
    named = set(re.findall(r"`(test_\w+)`", (here / "README.md").read_text()))
    there = {
        name for file in here.parents[1].rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named - there == set()
