from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app import grade_rows, score_file
from rollfeed.config import RewardSettings
from rollfeed.errors import DataError
from rollfeed.rewards.scoring import ScoreCounts, read_rows
from rollfeed.types import Outcome


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"row {n}", "rm_type": "math", "response": rf"\boxed{{{n % 3}}}", "label": "1"} for n in range(count)
    ]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_rows_come_back_in_order_with_their_rewards() -> None:
    results = [result async for result in grade_rows(rows(3_000))]
    assert [result["id"] for result in results] == [f"row {n}" for n in range(3_000)]
    assert [result["reward"] for result in results] == [float(n % 3 == 1) for n in range(3_000)]
    assert list(results[0]) == ["id", "reward", "outcome", "extracted", "seconds", "detail"]


async def test_bad_rows_are_errors_of_their_own_with_the_cause() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"rm_type": "maths", "response": "x", "label": "1"}, "did you mean math?"),
        ({"rm_type": 3, "response": "x", "label": "1"}, "no such grader"),
        ({"response": "x", "label": "1"}, "no rm_type"),
        ({"rm_type": "math", "response": None, "label": "1"}, "response is None"),
        ({"rm_type": "math", "label": "1"}, "response is None"),
        ({"rm_type": "math", "response": r"\boxed{1}"}, "label is None"),
        ({"rm_type": "math", "response": r"\boxed{1}", "label": {"a": 1}}, "label is"),
        ({"rm_type": "math", "response": "x", "label": "1", "metadata": "{"}, "metadata"),
        ({"rm_type": "math", "response": "x", "label": "1", "metadata": [1]}, "metadata"),
        ({"rm_type": "math", "response": r"\boxed{1}", "label": "1", "reward_key": 3}, "reward_key is 3"),
        ({"rm_type": "remote_rm", "response": "x", "label": "1"}, "reward.remote.url"),
        ({"rm_type": "livecodebench", "response": "```\nx\n```", "label": "{"}, "label"),
    ]
    results = [result async for result in grade_rows([row for row, _ in bad])]
    for result, (_, cause) in zip(results, bad, strict=True):
        assert (result["outcome"], result["reward"], result["id"]) == ("error", None, None)
        assert cause in result["detail"]


async def test_rm_type_of_the_settings_is_for_rows_without_one() -> None:
    settings = RewardSettings(rm_type="exact")
    results = [r async for r in grade_rows([{"response": "yes", "label": "yes"}, *rows(2)], settings)]
    assert [result["reward"] for result in results] == [1.0, 0.0, 1.0]


async def test_file_is_graded_into_another_with_progress(tmp_path: Path) -> None:
    seen: list[int] = []
    out = tmp_path / "out.jsonl"

    def progress(counts: ScoreCounts) -> None:
        assert not out.exists()
        assert counts.total == 5
        seen.append(counts.graded)

    records = [*rows(4), {"rm_type": "math", "response": None, "label": "\ud800"}]
    counts = await score_file(write(tmp_path / "in.jsonl", records), out, progress=progress)
    assert seen == [1, 2, 3, 4, 5]
    assert counts.by_outcome == {Outcome.OK: 4, Outcome.ERROR: 1}
    assert [result["reward"] for result in read(out)] == [0.0, 1.0, 0.0, 0.0, None]
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"{", "not JSON"),
        (b"3", "a int"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"a,b", "not JSON"),
    ],
)
async def test_line_that_is_no_object_is_named_and_nothing_is_written(tmp_path: Path, line: bytes, cause: str) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b'{"rm_type": "math", "response": "", "label": "1"}\n\n' + line + b"\n")
    out.write_text("old")
    with pytest.raises(DataError, match="line 3: ") as caught:
        await score_file(path, out)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)
    assert out.read_text() == "old"
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]


async def test_file_that_is_cut_short_leaves_the_old_result(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl", rows(50)), tmp_path / "out.jsonl"
    out.write_text("old")

    def progress(counts: ScoreCounts) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        await score_file(path, out, progress=progress)
    assert out.read_text() == "old"
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]


async def test_cancelled_grading_leaves_no_process(leaves_no_process: None) -> None:
    tests = {"inputs": [""], "outputs": ["1"]}
    program = {"rm_type": "livecodebench", "response": "```python\nwhile True: pass\n```", "label": tests}
    grading = asyncio.ensure_future(anext(grade_rows([program] * 4)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await grading


def test_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        list(read_rows(tmp_path / "missing.jsonl"))
    path = write(tmp_path / "in.jsonl", rows(1))
    for out in (tmp_path, tmp_path / "no" / "out.jsonl"):
        with pytest.raises(DataError, match="choose another --out"):
            asyncio.run(score_file(path, out))


def test_byte_order_mark_and_empty_files_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\r\n')
    assert list(read_rows(path)) == [{"id": 1}]
    path.write_bytes(b"")
    assert asyncio.run(score_file(path, tmp_path / "out.jsonl")).graded == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""
