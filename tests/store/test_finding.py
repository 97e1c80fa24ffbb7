"""Finding samples by conditions, in the files of a run or an evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollfeed.errors import ConfigError, RunDirectoryError
from rollfeed.store import RunDirectory, RunReader
from rollfeed.store.finding import FoundSample, SampleFilter, find_answers, find_samples
from rollfeed.types import Correct, SampleStatus, Verdict

EVERYTHING = 100


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_commit) -> Path:
    """Steps 1 and 2 of groups 0, 1, 3 and 4 with rewards 1 and 0, and of the dropped ones 2 and 5 with 0 and 0."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with RunDirectory.open(path, settings={"seed": 1}, identity={"seed": 1}, overwrite=False) as directory:
        for step in (1, 2):
            directory.commit(make_commit(step), reward_key=None)
    return path


def found(run: Path, text: str, *, num: int = EVERYTHING, worst: bool = False) -> list[FoundSample]:
    with RunReader(run) as reader:
        return find_samples(reader, SampleFilter(*([text] if text else [])), num=num, worst=worst)[0]


def places(samples: list[FoundSample]) -> list[str]:
    return [f"{each.group_index}.{each.member}" for each in samples]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["3.0", "3.1", "4.0", "4.1", "5.0", "5.1", "0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]),
        ("reward<0.2, kept", ["3.1", "4.1", "0.1", "1.1"]),
        ("reward >= 1", ["3.0", "4.0", "0.0", "1.0"]),
        ("wrong and step=1", ["0.1", "1.1", "2.0", "2.1"]),
        ("right, step<2", ["0.0", "1.0"]),
        ("dropped", ["5.0", "5.1", "2.0", "2.1"]),
        ("reason=zero_std_0.0 and length>2", ["5.1", "2.1"]),
        ("reason!=zero_std_0.0", []),
        ("kept, dropped", []),
        ("group==4", ["4.0", "4.1"]),
        ("response~FOUR 1, step=2", ["3.1", "4.1", "5.1"]),
        ("prompt~'is 3 +'", ["3.0", "3.1"]),
        ("source=words, step!=1, extracted=0", ["3.0", "4.0", "5.0"]),
        ("source=sums", []),
        ('response~"so, four"', []),
        ('kept and response~"FOUR 1", step=2', ["3.1", "4.1"]),
        ("finish=stop, group=0", ["0.0", "0.1"]),
        ("truncated", []),
        ("failed", []),
        ("unscored", []),
        ("empty", []),
    ],
)
def test_samples_that_fulfil_all_conditions_are_found_newest_step_first(run, text, expected) -> None:
    assert places(found(run, text)) == expected


def test_what_is_found_has_its_texts_and_its_place(run) -> None:
    (sample,) = found(run, "group=5, length=3")
    assert (sample.step, sample.group_index, sample.member) == (2, 5, 1)
    assert (sample.question, sample.response, sample.label) == ("What is 5 + 1?", "four 1", "6")
    assert (sample.reward, sample.correct, sample.status) == (0.0, Correct.NO, SampleStatus.COMPLETED)
    assert (sample.drop_reason, sample.extracted, sample.prompt_id) == ("zero_std_0.0", "1", "words/5")


def test_the_worst_come_first_and_of_equal_ones_the_newest(run) -> None:
    assert places(found(run, "kept", worst=True)) == ["3.1", "4.1", "0.1", "1.1", "3.0", "4.0", "0.0", "1.0"]
    assert places(found(run, "", num=3, worst=True)) == ["3.1", "4.1", "5.0"]


def test_where_a_grader_does_not_say_what_is_right_a_reward_of_1_is(tmp_path, make_commit, make_group) -> None:
    with RunDirectory.open(tmp_path / "run", settings={}, identity={}, overwrite=False) as directory:
        commit = make_commit(1, num_dropped=0)
        groups = []
        for each in commit.batch.groups:
            group = make_group(each.group_index, [0.75, 1.0])
            verdicts = [Verdict(reward=0.75), Verdict(reward=1.0)]
            rollouts = [rollout.with_reward(verdict) for rollout, verdict in zip(group.rollouts, verdicts, strict=True)]
            groups.append(replace(group, rollouts=tuple(rollouts)))
        directory.commit(replace(commit, batch=replace(commit.batch, groups=tuple(groups))), reward_key=None)
    assert places(found(tmp_path / "run", "wrong")) == ["0.0", "1.0"]
    assert places(found(tmp_path / "run", "right")) == ["0.1", "1.1"]


def test_whether_there_are_more_is_told(run) -> None:
    with RunReader(run) as reader:
        for worst in (False, True):
            assert find_samples(reader, SampleFilter("wrong"), num=7, worst=worst)[1]
            assert not find_samples(reader, SampleFilter("wrong"), num=8, worst=worst)[1]


def test_worse_samples_of_earlier_steps_are_found(tmp_path, make_commit, make_group) -> None:
    with RunDirectory.open(tmp_path / "run", settings={}, identity={}, overwrite=False) as directory:
        for step, low in ((1, -1.0), (2, 0.25), (3, 0.5)):
            commit = make_commit(step, num_dropped=0)
            groups = tuple(make_group(each.group_index, [low, 1.0]) for each in commit.batch.groups)
            directory.commit(replace(commit, batch=replace(commit.batch, groups=groups)), reward_key=None)
    assert [each.reward for each in found(tmp_path / "run", "", num=3, worst=True)] == [-1.0, -1.0, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrd<0.2", "no field 'rewrd'; did you mean reward?"),
        ("wromg", "no condition 'wromg'; did you mean wrong?"),
        ("reward<low", "reward is compared with a number, not with 'low'"),
        ("reward~1", "reward cannot be compared by ~; use <=, >=, !=, <, >, ="),
        ("source<3", "source cannot be compared by <; use =, != or ~"),
        ("reward<0.2,", "write conditions such as reward<0.2"),
        ("__import__('os')", "write conditions such as reward<0.2"),
        ("correct~yes", "correct is one of yes, no, undefined: correct=no"),
        ("correct=maybe", "correct is one of yes, no, undefined: correct=no"),
    ],
)
def test_a_condition_that_is_none_is_refused_in_one_line(text, message) -> None:
    with pytest.raises(ConfigError) as refused:
        SampleFilter(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path, make_commit) -> None:
    path = tmp_path / "run"
    with RunDirectory.open(path, settings={}, identity={}, overwrite=False) as directory:
        directory.commit(make_commit(1), reward_key=None)
    batch = path / "batches" / "step-000001.parquet"
    batch.write_bytes(batch.read_bytes()[:-40])
    with pytest.raises(RunDirectoryError, match=r"step-000001\.parquet: is damaged"):
        found(path, "wrong")
    batch.unlink()
    with pytest.raises(RunDirectoryError, match=r"step-000001\.parquet: is missing"):
        found(path, "", worst=True)


def answers(path: Path) -> Path:
    rows = [
        {
            **{"set": name, "index": index, "answer": answer, "prompt_id": f"{name}/{index}", "prompt": f"Q{index}"},
            **{"label": '"4"', "response": f"A{answer}", "status": "completed", "response_length": 5},
            **{"reward": float(answer), "correct": bool(answer), "extracted": str(answer), "error": None},
        }
        for name in ("sums", "words")
        for index in range(2)
        for answer in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path / "answers.parquet")
    return path / "answers.parquet"


def test_answers_of_an_evaluation_are_found_by_the_same_conditions(tmp_path) -> None:
    file = answers(tmp_path)
    wrong, more = find_answers(file, SampleFilter("wrong, source=words"), num=EVERYTHING, worst=False)
    assert [(each.source, each.group_index, each.member) for each in wrong] == [("words", 0, 0), ("words", 1, 0)]
    assert (wrong[0].correct, wrong[0].question, wrong[0].response, more) == (Correct.NO, "Q0", "A0", False)
    worst, more = find_answers(file, SampleFilter(), num=5, worst=True)
    assert [each.reward for each in worst] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert more


def test_the_question_of_an_answer_is_its_last_user_message(tmp_path) -> None:
    file = answers(tmp_path)
    messages = json.dumps([{"role": "system", "content": "S"}, {"role": "user", "content": "漢?"}])
    rows = [{**row, "messages": messages} for row in pq.read_table(file).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), file)
    (first,), _ = find_answers(file, SampleFilter(), num=1, worst=False)
    assert first.question == "漢?"


@pytest.mark.parametrize("text", ["dropped", "reason=x", "step=1", "detail~x"])
def test_an_evaluation_is_not_asked_for_what_only_runs_have(tmp_path, text) -> None:
    with pytest.raises(ConfigError, match="an evaluation has no"):
        find_answers(answers(tmp_path), SampleFilter(text), num=1, worst=False)


@pytest.mark.parametrize(
    ("text", "num"), [("label=4", 8), ('label="4"', 8), ("label!=4", 0), ("label=5", 0), ("label~4", 8)]
)
def test_a_label_is_found_as_people_write_it(tmp_path, text, num) -> None:
    assert len(find_answers(answers(tmp_path), SampleFilter(text), num=EVERYTHING, worst=False)[0]) == num


@pytest.mark.parametrize(("text", "num"), [("correct=undefined", 1), ("correct!=undefined", 7), ("correct=yes", 4)])
def test_answers_that_are_neither_right_nor_wrong_are_found(tmp_path, text, num) -> None:
    path = answers(tmp_path)
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0]["correct"] = None
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    assert len(find_answers(path, SampleFilter(text), num=EVERYTHING, worst=False)[0]) == num
