from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollfeed.compat.slime_plugins.names.data import read_file


@pytest.mark.parametrize("rows", ["", "@[0:1]"])
def test_a_parquet_file_is_read_with_all_its_columns(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"text": ["2 + 2 =", "3 + 3 ="], "label": ["4", "6"]}), file)
    expected = [{"text": "2 + 2 =", "label": "4"}, {"text": "3 + 3 =", "label": "6"}]
    assert list(read_file(f"{file}{rows}")) == expected[: 1 if rows else 2]
