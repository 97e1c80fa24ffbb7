"""Two evaluations are compared over the prompts that both have, paired."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollfeed.app import read_outcomes
from rollfeed.errors import ConfigError, DataError
from rollfeed.evaluation import ANSWERS_SCHEMA, compare
from rollfeed.evaluation.statistics import paired_interval


def write(folder: Path, answers: dict[str, Sequence[bool | None]], name: str = "aime") -> Path:
    folder.mkdir()
    rows = [
        {"set": name, "index": index, "answer": number, "prompt_id": prompt, "label": '"1"', "correct": correct}
        for index, (prompt, all_answers) in enumerate(answers.items())
        for number, correct in enumerate(all_answers)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=ANSWERS_SCHEMA), folder / "answers.parquet")
    return folder


def test_a_change_is_of_the_prompts_that_both_have_with_its_paired_interval(tmp_path: Path) -> None:
    before = write(tmp_path / "a", {"p0": [True, False], "p1": [False, False], "p2": [True, True], "p3": [True, True]})
    after = write(tmp_path / "b", {"p2": [True, True], "p1": [True, False], "p0": [True, True], "p4": [True, True]})
    (found,) = compare(read_outcomes(before), read_outcomes(after))
    assert (found.num_prompts, found.num_better, found.num_worse, found.num_unpaired) == (3, 2, 0, 2)
    assert found.accuracy_before == pytest.approx(0.5)
    assert found.change == pytest.approx(1 / 3)
    assert found.interval == paired_interval([0.5, 0.0, 1.0], [1.0, 0.5, 1.0], trials_before=2, trials_after=2)


def test_a_prompt_that_failed_in_one_is_left_out(tmp_path: Path) -> None:
    before = write(tmp_path / "a", {"p0": [True, None], "p1": [False, True]})
    after = write(tmp_path / "b", {"p0": [True, True], "p1": [True, True]})
    (found,) = compare(read_outcomes(before), read_outcomes(after))
    assert (found.num_prompts, found.num_unpaired, found.change) == (1, 1, 0.5)


def test_the_last_evaluation_of_a_training_counts(tmp_path: Path) -> None:
    for name, last in (("a", [1, 0, None]), ("b", [2, 1, 2])):
        (tmp_path / name).mkdir()
        lines = [
            {"prompts": {"aime": {"digest": "d", "right": right}}, "sets": {"aime": {"n_samples_per_prompt": 2}}}
            for right in ([0, 0, 0], last)
        ]
        (tmp_path / name / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (tmp_path / "b" / "eval.jsonl").open("a") as file:
        file.write('{"prompts": {"ai')  # a process that was killed
    (found,) = compare(read_outcomes(tmp_path / "a"), read_outcomes(tmp_path / "b"))
    assert (found.num_prompts, found.change, found.num_better) == (2, 0.5, 2)


def test_evaluations_of_other_prompts_are_refused(tmp_path: Path) -> None:
    before, after = write(tmp_path / "a", {"p0": [True]}), write(tmp_path / "b", {"p0": [True]}, name="gpqa")
    with pytest.raises(ConfigError, match="no prompt in common: the sets of one are aime, of the other gpqa"):
        compare(read_outcomes(before), read_outcomes(after))


def test_a_folder_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no answers\.parquet of rollfeed eval and no eval\.jsonl"):
        read_outcomes(tmp_path)
    (tmp_path / "eval.jsonl").write_text("no json\n")
    with pytest.raises(DataError, match="cannot be read"):
        read_outcomes(tmp_path)
