from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from docs.pages.parquet import with_tables
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfeed.errors import RunDirectoryError
from rollfeed.store.tables.parquet import (
    batch_table,
    dropped_table,
    read_batch,
    read_columns,
    read_groups,
    read_timings,
    timings_table,
    write_table,
)
from rollfeed.store.tables.schema import (
    BATCH_SCHEMA,
    DROPPED_COLUMNS,
    DROPPED_SCHEMA,
    RARE_COLUMNS,
    TIMING_COLUMNS,
)
from rollfeed.types import Dropped, Group, Prompt, Rollout, Sample, SampleStatus, TrainBatch, VersionSpan

DOCUMENT = Path(__file__).parents[3] / "docs" / "parquet.md"


def written(table: pa.Table) -> bytes:
    file = io.BytesIO()
    write_table(table, file)
    return file.getvalue()


def put(path: Path, table: pa.Table) -> Path:
    path.write_bytes(written(table))
    return path


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_dropped_groups_of_every_shape_come_back(data, any_group, plain, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    dropped = [
        Dropped(group=data.draw(any_group(index)), reason=data.draw(st.sampled_from(["zero_std_0.0", "failed"])))
        for index in range(data.draw(st.integers(1, 3)))
    ]
    table = dropped_table(dropped, step=2, policy_version=3, reward_key=None)
    path = put(folder / "d.parquet", table)
    timings = read_timings(put(folder / "t.parquet", timings_table([drop.group for drop in dropped])))
    assert plain(read_groups(path, timings=timings)) == plain([(drop.group, drop.reason) for drop in dropped])


def test_samples_with_rewards_of_their_own_come_back_with_their_verdict(with_own_rewards, plain, tmp_path) -> None:
    advantages_S = np.array([-0.25, 0.25, 0.0, 0.0], np.float32)
    batch = TrainBatch(step=0, policy_version=0, groups=(with_own_rewards,), advantages_S=advantages_S, metrics={})
    path = put(tmp_path / "b.parquet", batch_table(batch, reward_key=None))
    assert read_columns(path, ["reward", "correct"]) == [
        {"reward": 0.2, "correct": "undefined"},
        *[{"reward": 0.9, "correct": "yes"}] * 3,
    ]
    timings = read_timings(put(tmp_path / "t.parquet", timings_table([with_own_rewards])))
    read = read_batch(path, metrics={}, timings=timings)
    assert plain(read.groups) == plain(batch.groups)
    assert [rollout.verdict.reward for rollout in read.groups[0].rollouts] == [0.55, 0.9]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_batch_comes_back(data, any_group, plain, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    groups = tuple(data.draw(any_group(index, at_least=1)) for index in range(data.draw(st.integers(1, 2))))
    num_samples = sum(len(group.samples) for group in groups)
    batch = TrainBatch(
        step=4,
        policy_version=9,
        groups=groups,
        advantages_S=np.linspace(-1, 1, num_samples, dtype=np.float32),
        metrics={"rollout/reward_mean": 0.5},
    )
    path = put(folder / "b.parquet", batch_table(batch, reward_key=None))
    timings = read_timings(put(folder / "t.parquet", timings_table(groups)))
    assert plain(read_batch(path, metrics=batch.metrics, timings=timings)) == plain(batch)


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_a_batch_with_an_advantage_a_token_and_penalties_comes_back(data, any_group, plain, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    groups = tuple(data.draw(any_group(index, at_least=1)) for index in range(2))
    samples = [sample for group in groups for sample in group.samples]
    batch = TrainBatch(
        step=4,
        policy_version=9,
        groups=groups,
        advantages_S=tuple(np.linspace(-1, 1, sample.response_length, dtype=np.float32) for sample in samples),
        penalties_S=np.linspace(-1, 0, len(samples), dtype=np.float32),
        metrics={},
    )
    path = put(folder / "b.parquet", batch_table(batch, reward_key=None))
    timings = read_timings(put(folder / "t.parquet", timings_table(groups)))
    read = read_batch(path, metrics={}, timings=timings)
    assert plain(read) == plain(batch)
    assert [each.dtype for each in read.advantages_S] == [np.float32] * len(samples)
    (first, *_) = read_columns(path, ["advantage", "penalty"])
    assert first == {"advantage": batch.advantages_S[0].tolist(), "penalty": -1.0}


def test_a_batch_file_of_before_penalties_is_read(make_commit, plain, tmp_path) -> None:
    batch = make_commit(1).batch
    table = batch_table(batch, reward_key=None).drop_columns(["penalty"])
    timings = read_timings(put(tmp_path / "t.parquet", timings_table(batch.groups)))
    read = read_batch(put(tmp_path / "b.parquet", table), metrics=batch.metrics, timings=timings)
    assert plain(read) == plain(batch)
    assert read.penalties_S is None


def test_what_tokens_were_drawn_from_has_columns_where_it_is_known(make_group, with_masks, plain, tmp_path) -> None:
    first, second = make_group(4, [1.0, 0.0]), make_group(5, [1.0, 0.0])
    for groups, has_columns in (((first, second), False), ((first, with_masks(second)), True)):
        samples = sum(len(group.samples) for group in groups)
        batch = TrainBatch(
            step=1, policy_version=2, groups=groups, advantages_S=np.zeros(samples, np.float32), metrics={}
        )
        table = batch_table(batch, reward_key=None)
        assert ({"sampling_mask_lengths", "sampling_mask_token_ids"} <= set(table.column_names)) is has_columns
        read = read_batch(put(tmp_path / f"{has_columns}.parquet", table), metrics={}, timings={})
        assert [plain(sample.sampling_mask) for sample in read.samples] == [
            plain(sample.sampling_mask) for sample in batch.samples
        ]


def test_the_same_records_give_the_same_bytes(make_commit) -> None:
    first, second = make_commit(1), make_commit(1)
    assert written(batch_table(first.batch, reward_key=None)) == written(batch_table(second.batch, reward_key=None))


def test_times_and_cache_counters_do_not_reach_batch_files(make_commit) -> None:
    fast, slow = make_commit(1, seconds=0.1), make_commit(1, seconds=9.0)
    assert written(batch_table(fast.batch, reward_key=None)) == written(batch_table(slow.batch, reward_key=None))
    tables = [dropped_table(commit.dropped, step=1, policy_version=7, reward_key=None) for commit in (fast, slow)]
    assert written(tables[0]) == written(tables[1])


def test_another_token_gives_other_bytes(make_group) -> None:
    def table(response: str) -> pa.Table:
        group = make_group(0, [1.0], response=response)
        advantages = np.zeros(1, np.float32)
        batch = TrainBatch(step=1, policy_version=0, groups=(group,), advantages_S=advantages, metrics={})
        return batch_table(batch, reward_key=None)

    assert written(table("four")) != written(table("five"))


def test_one_group_is_read_without_the_others(make_commit, plain, tmp_path) -> None:
    batch = make_commit(1).batch
    path = put(tmp_path / "b.parquet", batch_table(batch, reward_key=None))
    timings = read_timings(put(tmp_path / "t.parquet", timings_table(batch.groups)), group_index=1)
    assert plain(read_groups(path, group_index=1, timings=timings)) == plain([(batch.groups[1], None)])
    assert read_groups(path, group_index=99, timings=timings) == ()


def long_group(group_index: int, length: int) -> Group:
    sample = Sample(
        token_ids=np.zeros(length, np.int32),
        response_length=length,
        loss_mask=np.ones(length, np.float32),
        logprobs=np.zeros(length, np.float32),
        version_spans=(VersionSpan(0, length, 0),),
        status=SampleStatus.TRUNCATED,
        group_index=group_index,
        index=group_index,
        rollout_id=group_index,
    )
    prompt = Prompt(prompt_id="p", source="s", text="", token_ids=np.zeros(0, np.int32))
    return Group(group_index=group_index, prompt=prompt, rollouts=(Rollout(rollout_id=group_index, samples=(sample,)),))


def test_row_groups_end_with_groups_and_are_bounded_in_tokens() -> None:
    groups = tuple(long_group(index, 100_000) for index in range(7))
    batch = TrainBatch(step=1, policy_version=0, groups=groups, advantages_S=np.zeros(7, np.float32), metrics={})
    metadata = pq.ParquetFile(io.BytesIO(written(batch_table(batch, reward_key=None)))).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3, 3, 1]


def test_reward_is_the_number_under_the_key_and_rewards_the_dictionary(make_group, tmp_path) -> None:
    group = make_group(0, [1.0])
    rollout = group.rollouts[0]
    samples = [{**rollout.samples[0].to_dict(), "reward": {"score": 0.25, "format": 1.0}}]
    group = Group(
        group_index=0,
        prompt=group.prompt,
        rollouts=(Rollout(rollout_id=0, samples=tuple(Sample.from_dict(s) for s in samples)),),
    )
    dropped = [Dropped(group=group, reason="x")]

    def columns(reward_key: str | None) -> dict[str, object]:
        table = dropped_table(dropped, step=1, policy_version=0, reward_key=reward_key)
        (row,) = read_columns(put(tmp_path / "d.parquet", table), ["reward", "rewards"])
        return row

    assert columns("score") == {"reward": 0.25, "rewards": '{"score":0.25,"format":1.0}'}
    assert columns(None) == {"reward": None, "rewards": '{"score":0.25,"format":1.0}'}
    assert columns("missing") == {"reward": None, "rewards": '{"score":0.25,"format":1.0}'}


def test_a_lone_surrogate_is_stored_as_a_replacement_character(tmp_path) -> None:
    prompt = Prompt(prompt_id="p", source="s", text="a\ud800", token_ids=np.zeros(0, np.int32), label="\udfff")
    dropped = [Dropped(group=Group(group_index=0, prompt=prompt, rollouts=()), reason="failed")]
    path = put(tmp_path / "d.parquet", dropped_table(dropped, step=1, policy_version=0, reward_key=None))
    ((group, _),) = read_groups(path, timings={})
    assert (group.prompt.text, group.prompt.label) == ("a\ufffd", "\ufffd")


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(RunDirectoryError, match=r"b\.parquet: is missing"):
        read_groups(tmp_path / "b.parquet", timings={})


def test_a_damaged_file_is_one_line(make_commit, tmp_path) -> None:
    path = put(tmp_path / "b.parquet", batch_table(make_commit(1).batch, reward_key=None))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunDirectoryError, match=r"b\.parquet: is damaged") as caught:
        read_groups(path, timings={})
    assert "\n" not in str(caught.value)


def test_a_file_of_another_program_or_version_is_refused(tmp_path) -> None:
    path = tmp_path / "b.parquet"
    pq.write_table(pa.table({"step": [1]}), path)
    with pytest.raises(RunDirectoryError, match=r"has no rollfeed\.schema, this rollfeed reads 1"):
        read_groups(path, timings={})
    pq.write_table(pa.table({"step": [1]}).replace_schema_metadata({"rollfeed.schema": "2"}), path)
    with pytest.raises(RunDirectoryError, match=r"has rollfeed\.schema 2, this rollfeed reads 1"):
        read_groups(path, timings={})


def test_the_document_lists_exactly_the_columns_with_their_types_and_meanings() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(page) == page
    assert all(f"| `{column.name}` |" in page for column in (*DROPPED_COLUMNS, *RARE_COLUMNS, *TIMING_COLUMNS))


def test_dropped_files_have_the_columns_of_batch_files_and_the_reason() -> None:
    assert DROPPED_SCHEMA.names == [*BATCH_SCHEMA.names, "drop_reason"]
