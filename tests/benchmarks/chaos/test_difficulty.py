from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollfeed.benchmarks.chaos.difficulty import wrong_levels

NAMES = ("core/a@0", "core/a@1")


def write(out: Path, folder: str, groups: dict[int, tuple[str, int]]) -> None:
    """Write a step with a group a row of three rollouts: its level, and how many are right."""
    rows = [
        {"group_index": index, "prompt_id": f"{name}/train/{index}", "correct": "yes" if member < right else "no"}
        for index, (name, right) in groups.items()
        for member in range(3)
    ]
    (out / folder).mkdir()
    pq.write_table(pa.Table.from_pylist(rows), out / folder / "step-000000.parquet")


def state_of(*rows: list[int]) -> dict[str, Any]:
    columns = ["level", "num_groups", "num_correct"]
    return {"columns": columns, "environments": {"core/a": {"difficulty": {"levels": list(rows)}}}}


@pytest.mark.parametrize(
    ("rows", "num_surplus", "told"),
    [
        (([0, 2, 4], [1, 1, 0]), 0, []),
        (([0, 2, 4], [1, 2, 1]), 1, []),
        (([0, 2, 4], [1, 2, 1]), 0, ["1 groups that are in no file, and 0 wait"]),
        (([0, 2, 3], [1, 1, 0]), 0, ["core/a@0: the table has", "2 groups, 4 right"]),
        (([0, 2, 4],), 0, ["core/a@1: the table has None, the files 1 groups", "-1 groups that are in no file"]),
    ],
)
def test_tables_count_the_groups_of_the_files_once(
    tmp_path: Path, rows: tuple[list[int], ...], num_surplus: int, told: list[str]
) -> None:
    write(tmp_path, "batches", {0: (NAMES[0], 2), 1: (NAMES[1], 0)})
    write(tmp_path, "dropped", {2: (NAMES[0], 2)})
    found = " ".join(wrong_levels(state_of(*rows), tmp_path, num_surplus=num_surplus))
    assert all(each in found for each in told)
    assert bool(told) is bool(found)
