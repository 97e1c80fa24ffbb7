"""The tables of docs/parquet.md, generated from the columns: ``python docs/pages/parquet.py FILE``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rollfeed.store.tables.schema import DROPPED_COLUMNS, RARE_COLUMNS, TIMING_COLUMNS, Column

_SECTIONS = {"batch, dropped": DROPPED_COLUMNS, "in some files": RARE_COLUMNS, "timings": TIMING_COLUMNS}


def with_tables(page: str) -> str:
    """Return the page with each section's table as the columns are now."""
    for heading, columns in _SECTIONS.items():
        rows = "".join(map(_row, columns))
        table = f"| column | type | meaning |\n|---|---|---|\n{rows}"
        page = re.sub(rf"(?<=\n)(## {heading}\n[^|]*)(?:\|.*\n)+", lambda found: found[1] + table, page)  # noqa: B023
    return page


def _row(column: Column) -> str:
    kind = str(column.type).replace("element: ", "")
    return f"| `{column.name}` | {kind} | {column.meaning} |\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
