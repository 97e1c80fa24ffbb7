from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollfeed import app
from rollfeed.config import RunSpec, validate_settings
from rollfeed.errors import ConfigError
from rollfeed.prompts import DataLimit


def limit(num_prompts: int, num_epoch: int, size: int, *, fewest: int | None = None, is_sure: bool = True) -> DataLimit:
    total = num_prompts * num_epoch // size
    return DataLimit(
        num_prompts=num_prompts,
        num_epoch=num_epoch,
        rollout_batch_size=size,
        fewest=total if fewest is None else fewest,
        is_sure=is_sure,
    )


@pytest.mark.parametrize(
    ("given", "num_rollout", "text"),
    [
        (limit(4, 1, 2), 10, "4 prompts x 1 epoch are 2 batches of 2; num_rollout = 10: the run ends after 2"),
        (limit(4, 1, 2), 2, "4 prompts x 1 epoch are 2 batches of 2"),
        (limit(3, 2, 4), 5, "3 prompts x 2 epochs are 1 batch of 4; num_rollout = 5: the run ends after 1"),
        (
            limit(9, 1, 2, is_sure=False),
            9,
            "9 prompts x 1 epoch are at most 4 batches of 2; num_rollout = 9: the run ends after at most 4",
        ),
        (
            limit(9, 1, 2, is_sure=False),
            3,
            "9 prompts x 1 epoch are at most 4 batches of 2; num_rollout = 3: the run may end before",
        ),
        (
            limit(9, 1, 2, fewest=2),
            3,
            "9 prompts x 1 epoch are 2 to 4 batches of 2; num_rollout = 3: the run may end before",
        ),
    ],
)
def test_what_a_file_is_good_for_is_said_in_a_line(given: DataLimit, num_rollout: int, text: str) -> None:
    assert given.describe(num_rollout) == text


def prepared(checkpoint: Path, folder: Path, *, num_rows: int = 9, **sections: object) -> app.PreparedRun:
    rows = [{"prompt": f"{number}?", "label": str(number)} for number in range(num_rows)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"checkpoint": str(checkpoint)},
        "prompts": {"datasets": [{"path": "a.jsonl", "label_key": "label"}], "num_epoch": 1},
        "rollout": {"rollout_batch_size": 2, "num_rollout": 7},
        "engine": {"threads": 1, "num_slots": 4, "context_length": 256},
        "reward": {"rm_type": "exact"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return app.prepare(RunSpec(validate_settings(tree, where="test"), (folder,)))


def test_every_prompt_is_used_where_nothing_is_dropped(tiny_checkpoint: Path, tmp_path: Path) -> None:
    made = prepared(tiny_checkpoint, tmp_path, rollout={"over_sampling_batch_size": 4})
    assert made.data_limit == limit(9, 1, 2)
    assert made.num_batches == 4


def test_surplus_that_is_dropped_makes_fewer_batches(tiny_checkpoint: Path, tmp_path: Path) -> None:
    made = prepared(tiny_checkpoint, tmp_path, rollout={"over_sampling_batch_size": 4, "surplus": "drop"})
    assert made.data_limit == limit(9, 1, 2, fewest=2)


def test_a_filter_may_make_fewer_of_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    made = prepared(tiny_checkpoint, tmp_path, filters={"dynamic_sampling": [{"name": "reward_std"}]})
    assert made.data_limit == limit(9, 1, 2, is_sure=False)


def test_rows_that_are_passed_over_may_make_fewer_of_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    dataset = {"path": "a.jsonl", "label_key": "label", "adaptive": True}
    assert prepared(tiny_checkpoint, tmp_path, prompts={"datasets": [dataset]}).data_limit == limit(
        9, 1, 2, is_sure=False
    )


@pytest.mark.parametrize("endless", [{"num_epoch": None}, {"environments": [{"id": "core/copy_text"}]}])
def test_what_does_not_end_has_no_limit(tiny_checkpoint: Path, tmp_path: Path, endless: dict[str, object]) -> None:
    made = prepared(tiny_checkpoint, tmp_path, prompts=endless)
    assert made.data_limit is None
    assert made.num_batches == 7


def test_data_that_fills_no_batch_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    expected = r"prompts\.num_epoch = 1: 3 prompts x 1 fill no batch of rollout\.rollout_batch_size = 4"
    with pytest.raises(ConfigError, match=expected):
        prepared(tiny_checkpoint, tmp_path, num_rows=3, rollout={"rollout_batch_size": 4})
