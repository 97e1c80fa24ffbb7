from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfeed.errors import RunDirectoryError, RunFailedError
from rollfeed.store.codec import decode, encode
from rollfeed.types import (
    Correct,
    Group,
    LedgerCounts,
    Prompt,
    Rollout,
    RunState,
    Sample,
    SampleStatus,
    VersionSpan,
)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_group_comes_back_as_it_was(data, any_group, plain) -> None:
    group = data.draw(any_group())
    assert plain(decode(Group, encode(group))) == plain(group)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_draw_comes_back_as_it_was(data, any_draw, plain) -> None:
    draw = data.draw(any_draw)
    assert plain(decode(Group, encode(draw))) == plain(draw)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_state_comes_back_as_it_was(data, any_state, plain) -> None:
    state = data.draw(any_state)
    assert plain(decode(RunState, encode(state))) == plain(state)


def test_samples_with_rewards_of_their_own_come_back_with_their_verdict(with_own_rewards, plain) -> None:
    group = with_own_rewards
    assert plain(decode(Group, encode(group))) == plain(group)
    draw = Group(group.group_index, group.prompt, group.rollouts)
    assert plain(decode(Group, encode(draw))) == plain(draw)


def test_a_partial_sample_comes_back_with_its_tokens_and_spans(make_group, plain) -> None:
    group = make_group(4, [1.0, 0.0])
    finished, cut = group.rollouts
    sample = replace(cut.samples[0], status=SampleStatus.ABORTED, reward=None, metadata={"start_rollout_id": 3})
    draw = Group(4, group.prompt, (finished, replace(cut, samples=(sample,), verdict=None)))
    state = RunState(next_step=5, next_group_index=9, source={}, requeued=(draw,), in_flight=(draw,))
    decoded = decode(RunState, encode(state))
    assert plain(decoded) == plain(state)
    assert decoded.in_flight[0].response_tokens == draw.response_tokens > 0


def test_a_state_of_before_is_read_and_its_count_of_failures_says_nothing_of_the_last_rollouts() -> None:
    values = [5, 9, '{"cursor":5}', [], [], [], "{}", {"drawn": 9}, 16]
    body = msgspec.msgpack.encode(values)
    state = decode(RunState, msgspec.msgpack.encode(["state", 3, zlib.crc32(body), body]))
    assert state == RunState(next_step=5, next_group_index=9, source={"cursor": 5}, ledger=LedgerCounts(drawn=9))


def test_samples_of_before_are_as_right_as_their_verdict_says(make_group) -> None:
    kind, _, _, body = msgspec.msgpack.decode(encode(make_group(4, [1.0, 0.0])))
    values = msgspec.msgpack.decode(body)
    for rollout in values[2]:
        rollout[1] = [sample[:19] for sample in rollout[1]]  # up to `extra`
    body = msgspec.msgpack.encode(values)
    group = decode(Group, msgspec.msgpack.encode([kind, 3, zlib.crc32(body), body]))
    assert [sample.correct for sample in group.samples] == [Correct.YES, Correct.NO]


def test_what_tokens_were_drawn_from_comes_back(make_group, with_masks, plain) -> None:
    group = with_masks(make_group(4, [1.0, 0.0]))
    assert plain(decode(Group, encode(group))) == plain(group)


def test_integers_of_any_size_survive(make_group, plain) -> None:
    state = RunState(next_step=1, next_group_index=0, source={"seed": 2**200})
    assert decode(RunState, encode(state)).source == {"seed": 2**200}


def test_lone_surrogates_become_replacement_characters() -> None:
    prompt = Prompt(prompt_id="p", source="s", text="\ud800", token_ids=np.zeros(0, np.int32), label={"a": "\udfff"})
    decoded = decode(Group, encode(Group(0, prompt))).prompt
    assert (decoded.text, decoded.label) == ("\ufffd", {"a": "\ufffd"})


def test_a_buffered_token_takes_at_most_16_bytes() -> None:
    length = 10_000
    sample = Sample(
        token_ids=np.full(length, 49_000, np.int32),
        response_length=length,
        loss_mask=np.ones(length, np.float32),
        logprobs=np.full(length, -0.1, np.float32),
        version_spans=(VersionSpan(0, length, 0),),
        status=SampleStatus.ABORTED,
        group_index=0,
        index=0,
        rollout_id=0,
    )
    prompt = Prompt(prompt_id="p", source="s", text="", token_ids=np.zeros(0, np.int32))
    group = Group(group_index=0, prompt=prompt, rollouts=(Rollout(rollout_id=0, samples=(sample,)),))
    assert len(encode(group)) <= 16 * length


@given(data=st.data())
@settings(deadline=None)
def test_a_damaged_byte_is_found_or_changes_nothing(data, make_group, plain) -> None:
    group = make_group(0, [1.0, 0.0])
    encoded = bytearray(encode(group))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    # The version, and how the checksum is written, may become another that says the same.
    with suppress(RunDirectoryError):
        assert plain(decode(Group, bytes(encoded))) == plain(group)


@given(length=st.integers(0, 200))
@settings(deadline=None)
def test_a_cut_state_is_refused(length) -> None:
    encoded = encode(RunState(next_step=1, next_group_index=0, source={}))
    with pytest.raises(RunDirectoryError, match="stored state is damaged"):
        decode(RunState, encoded[: min(length, len(encoded) - 1)])


def test_another_version_is_refused_by_number() -> None:
    kind, _, checksum, body = msgspec.msgpack.decode(encode(RunState(next_step=1, next_group_index=0, source={})))
    with pytest.raises(RunDirectoryError, match="stored state has version 2, this rollfeed reads 4"):
        decode(RunState, msgspec.msgpack.encode([kind, 2, checksum, body]))


def test_another_kind_is_refused(make_group) -> None:
    with pytest.raises(RunDirectoryError, match="stored state is damaged: kind 'group'"):
        decode(RunState, encode(make_group(0, [1.0])))


def test_what_is_not_json_is_named(make_group) -> None:
    state = RunState(next_step=1, next_group_index=0, source={"random": object()})
    with pytest.raises(RunFailedError, match=r"the run's state: source cannot be stored: .*use JSON values"):
        encode(state)


def test_a_prompt_with_metadata_that_is_not_json_is_named() -> None:
    prompt = Prompt(prompt_id="p7", source="s", text="", token_ids=np.zeros(0, np.int32), metadata={"a": {1, 2}})
    with pytest.raises(RunFailedError, match="prompt p7: metadata cannot be stored"):
        encode(Group(0, prompt))
