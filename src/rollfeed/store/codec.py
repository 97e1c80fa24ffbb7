"""Groups, prompt draws and the run's state as bytes (msgpack), to be stored and read back.

Layout of version 4: ``[kind, version, checksum, body]``; version 3 is read, too. Arrays are raw
little-endian bytes, 12 a response token and 4 a prompt token; what users bring (labels, metadata,
messages) is JSON text.
Reading builds records and nothing else, so bytes from someone else are safe to open.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import RunDirectoryError
from rollfeed.store.json_text import to_json
from rollfeed.types import (
    Correct,
    Group,
    LedgerCounts,
    Outcome,
    Prompt,
    Reward,
    Rollout,
    RunState,
    Sample,
    SampleStatus,
    SamplingMask,
    Verdict,
    VersionSpan,
)
from rollfeed.types.text import well_formed

VERSION = 4
"""Raised when the layout changes."""
_READABLE = (3, VERSION)
"""Version 3 lacks what is optional below."""

_Json: TypeAlias = str
_Body = TypeVar("_Body")
_Record = TypeVar("_Record")


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    version: int
    checksum: int
    body: bytes


class _Prompt(msgspec.Struct, array_like=True, frozen=True):
    prompt_id: bytes
    source: bytes
    text: bytes
    token_ids: bytes
    messages: _Json
    label: _Json
    metadata: _Json
    tools: _Json
    images: list[bytes]


class _Sample(msgspec.Struct, array_like=True, frozen=True):
    token_ids: bytes
    response_length: int
    loss_mask: bytes
    logprobs: bytes
    version_spans: list[tuple[int, int, int]]
    status: SampleStatus
    group_index: int
    index: int
    rollout_id: int
    response: bytes
    label: _Json
    reward: float | dict[str, float] | None
    metadata: _Json
    images: list[bytes]
    non_generation_seconds: float
    cached_tokens: int
    precision: bytes
    remove_sample: bool
    extra: _Json
    correct: Correct | None = None
    """Not in version 3: there it is as the rollout's verdict says."""
    sampling_mask: tuple[bytes, bytes] | None = None
    state: _Json = "{}"


class _Verdict(msgspec.Struct, array_like=True, frozen=True):
    reward: float | dict[str, float] | None
    correct: Correct
    format_ok: bool
    extracted: bytes | None
    outcome: Outcome
    detail: bytes


class _Rollout(msgspec.Struct, array_like=True, frozen=True):
    rollout_id: int
    samples: list[_Sample]
    verdict: _Verdict | None
    error: bytes | None
    seconds: float


class _Group(msgspec.Struct, array_like=True, frozen=True):
    """A group, or a draw with what earlier executions left."""

    group_index: int
    prompt: _Prompt
    rollouts: list[_Rollout]


class _State(msgspec.Struct, array_like=True, frozen=True):
    next_step: int
    next_group_index: int
    source: _Json
    requeued: list[_Group]
    surplus: list[_Group]
    in_flight: list[_Group]
    lengths: _Json
    ledger: dict[str, int]
    outcomes: bytes | int
    """A byte a rollout; in version 3 the number of failures of the whole run, which says nothing of the last ones."""


def encode_group(group: Group) -> bytes:
    """Return a group as bytes, partial and unscored samples included.

    Raises:
        RunFailedError: If a label, metadata or message is not JSON.
    """
    return _seal("group", _pack_group(group))


def decode_group(encoded: bytes) -> Group:
    """Return the group that :func:`encode_group` was given.

    Raises:
        RunDirectoryError: If the bytes are damaged, of another kind or of another version.
    """
    return _opened("group", encoded, _Group, _unpack_group)


def encode_draw(draw: Group) -> bytes:
    """Return a prompt draw as bytes, what earlier executions left included.

    Raises:
        RunFailedError: If a label, metadata or message is not JSON.
    """
    return _seal("draw", _pack_draw(draw))


def decode_draw(encoded: bytes) -> Group:
    """Return the draw that :func:`encode_draw` was given.

    Raises:
        RunDirectoryError: If the bytes are damaged, of another kind or of another version.
    """
    return _opened("draw", encoded, _Group, _unpack_draw)


def encode_state(state: RunState) -> bytes:
    """Return a run's state as bytes.

    Raises:
        RunFailedError: If the source's state, a label, metadata or a message is not JSON.
    """
    body = _State(
        next_step=state.next_step,
        next_group_index=state.next_group_index,
        source=to_json(dict(state.source), "the prompt source's state"),
        requeued=[_pack_draw(draw) for draw in state.requeued],
        surplus=[_pack_group(group) for group in state.surplus],
        in_flight=[_pack_draw(draw) for draw in state.in_flight],
        lengths=to_json(dict(state.lengths), "what was learned of response lengths"),
        ledger={name: getattr(state.ledger, name) for name in LedgerCounts.__dataclass_fields__},
        outcomes=bytes(state.outcomes),
    )
    return _seal("state", body)


def decode_state(encoded: bytes) -> RunState:
    """Return the state that :func:`encode_state` was given.

    Raises:
        RunDirectoryError: If the bytes are damaged, of another kind or of another version.
    """
    return _opened("state", encoded, _State, _unpack_state)


def _seal(kind: str, body: msgspec.Struct) -> bytes:
    packed = msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode(_Envelope(kind, VERSION, zlib.crc32(packed), packed))


def _opened(kind: str, encoded: bytes, body_type: type[_Body], unpack: Callable[[_Body], _Record]) -> _Record:
    try:
        envelope = msgspec.msgpack.decode(encoded, type=_Envelope)
        if envelope.kind == kind and envelope.version not in _READABLE:
            raise RunDirectoryError(
                f"stored {kind} has version {envelope.version}, this rollfeed reads {VERSION}: "
                "use the rollfeed that wrote it"
            )
        if envelope.kind != kind or envelope.checksum != zlib.crc32(envelope.body):
            raise ValueError(f"kind {envelope.kind!r}, or a wrong checksum")
        return unpack(msgspec.msgpack.decode(envelope.body, type=body_type))
    except RunDirectoryError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise RunDirectoryError(f"stored {kind} is damaged: {error}; restore the run directory from a copy") from error


def _pack_group(group: Group) -> _Group:
    rollouts = [_pack_rollout(rollout) for rollout in group.rollouts]
    return _Group(group.group_index, _pack_prompt(group.prompt), rollouts)


def _unpack_group(group: _Group) -> Group:
    rollouts = tuple(_unpack_rollout(rollout) for rollout in group.rollouts)
    return Group(group_index=group.group_index, prompt=_unpack_prompt(group.prompt), rollouts=rollouts)


def _pack_draw(draw: Group) -> _Group:
    rollouts = [_pack_rollout(rollout) for rollout in draw.rollouts]
    return _Group(draw.group_index, _pack_prompt(draw.prompt), rollouts)


def _unpack_draw(draw: _Group) -> Group:
    rollouts = tuple(_unpack_rollout(rollout) for rollout in draw.rollouts)
    return Group(draw.group_index, _unpack_prompt(draw.prompt), rollouts)


def _unpack_state(state: _State) -> RunState:
    return RunState(
        next_step=state.next_step,
        next_group_index=state.next_group_index,
        source=json.loads(state.source),
        requeued=tuple(_unpack_draw(draw) for draw in state.requeued),
        surplus=tuple(_unpack_group(group) for group in state.surplus),
        in_flight=tuple(_unpack_draw(draw) for draw in state.in_flight),
        lengths=json.loads(state.lengths),
        ledger=LedgerCounts(**state.ledger),
        outcomes=tuple(map(bool, state.outcomes)) if isinstance(state.outcomes, bytes) else (),
    )


def _pack_prompt(prompt: Prompt) -> _Prompt:
    what = f"prompt {prompt.prompt_id}"
    return _Prompt(
        prompt_id=_text(prompt.prompt_id),
        source=_text(prompt.source),
        text=_text(prompt.text),
        token_ids=_array(prompt.token_ids, "<i4"),
        messages=to_json(None if prompt.messages is None else [dict(m) for m in prompt.messages], f"{what}: messages"),
        label=to_json(prompt.label, f"{what}: label"),
        metadata=to_json(dict(prompt.metadata), f"{what}: metadata"),
        tools=to_json(None if prompt.tools is None else [dict(tool) for tool in prompt.tools], f"{what}: tools"),
        images=[_text(image) for image in prompt.images],
    )


def _unpack_prompt(prompt: _Prompt) -> Prompt:
    messages, tools = json.loads(prompt.messages), json.loads(prompt.tools)
    return Prompt(
        prompt_id=_str(prompt.prompt_id),
        source=_str(prompt.source),
        text=_str(prompt.text),
        token_ids=_int32(prompt.token_ids),
        messages=None if messages is None else tuple(messages),
        label=json.loads(prompt.label),
        metadata=json.loads(prompt.metadata),
        tools=None if tools is None else tuple(tools),
        images=tuple(_str(image) for image in prompt.images),
    )


def _pack_sample(sample: Sample) -> _Sample:
    what, mask = f"sample {sample.index}", sample.sampling_mask
    return _Sample(
        token_ids=_array(sample.token_ids, "<i4"),
        response_length=sample.response_length,
        loss_mask=_array(sample.loss_mask, "<f4"),
        logprobs=_array(sample.logprobs, "<f4"),
        version_spans=[(int(span.start), int(span.end), int(span.policy_version)) for span in sample.version_spans],
        status=sample.status,
        group_index=sample.group_index,
        index=sample.index,
        rollout_id=sample.rollout_id,
        response=_text(sample.response),
        label=to_json(sample.label, f"{what}: label"),
        reward=_reward(sample.reward),
        metadata=to_json(dict(sample.metadata), f"{what}: metadata"),
        images=[_text(image) for image in sample.images],
        non_generation_seconds=float(sample.non_generation_seconds),
        cached_tokens=sample.cached_tokens,
        precision=_text(sample.precision),
        remove_sample=sample.remove_sample,
        extra=to_json(dict(sample.extra), f"{what}: unknown keys"),
        correct=sample.correct,
        sampling_mask=None if mask is None else (_array(mask.lengths, "<i4"), _array(mask.token_ids, "<i4")),
        state=to_json(dict(sample.state), f"{what}: state"),
    )


def _unpack_sample(sample: _Sample, verdict: _Verdict | None) -> Sample:
    known = verdict.correct if verdict is not None else Correct.UNDEFINED
    return Sample(
        token_ids=_int32(sample.token_ids),
        response_length=sample.response_length,
        loss_mask=np.frombuffer(sample.loss_mask, "<f4").astype(np.float32),
        logprobs=np.frombuffer(sample.logprobs, "<f4").astype(np.float32),
        version_spans=tuple(VersionSpan(*span) for span in sample.version_spans),
        status=sample.status,
        group_index=sample.group_index,
        index=sample.index,
        rollout_id=sample.rollout_id,
        response=_str(sample.response),
        label=json.loads(sample.label),
        reward=sample.reward,
        metadata=json.loads(sample.metadata),
        images=tuple(_str(image) for image in sample.images),
        non_generation_seconds=sample.non_generation_seconds,
        cached_tokens=sample.cached_tokens,
        precision=_str(sample.precision),
        remove_sample=sample.remove_sample,
        extra=json.loads(sample.extra),
        correct=known if sample.correct is None else sample.correct,
        sampling_mask=None if sample.sampling_mask is None else SamplingMask(*map(_int32, sample.sampling_mask)),
        state=json.loads(sample.state),
    )


def _pack_rollout(rollout: Rollout) -> _Rollout:
    return _Rollout(
        rollout_id=rollout.rollout_id,
        samples=[_pack_sample(sample) for sample in rollout.samples],
        verdict=None if rollout.verdict is None else _pack_verdict(rollout.verdict),
        error=None if rollout.error is None else _text(rollout.error),
        seconds=float(rollout.seconds),
    )


def _unpack_rollout(rollout: _Rollout) -> Rollout:
    return Rollout(
        rollout_id=rollout.rollout_id,
        samples=tuple(_unpack_sample(sample, rollout.verdict) for sample in rollout.samples),
        verdict=None if rollout.verdict is None else _unpack_verdict(rollout.verdict),
        error=None if rollout.error is None else _str(rollout.error),
        seconds=rollout.seconds,
    )


def _pack_verdict(verdict: Verdict) -> _Verdict:
    return _Verdict(
        reward=_reward(verdict.reward),
        correct=verdict.correct,
        format_ok=verdict.format_ok,
        extracted=None if verdict.extracted is None else _text(verdict.extracted),
        outcome=verdict.outcome,
        detail=_text(verdict.detail),
    )


def _unpack_verdict(verdict: _Verdict) -> Verdict:
    return Verdict(
        reward=verdict.reward,
        correct=verdict.correct,
        format_ok=verdict.format_ok,
        extracted=None if verdict.extracted is None else _str(verdict.extracted),
        outcome=verdict.outcome,
        detail=_str(verdict.detail),
    )


def _reward(reward: Reward | None) -> Reward | None:
    if isinstance(reward, dict):
        return {name: float(value) for name, value in reward.items()}
    return None if reward is None else float(reward)


def _array(values: NDArray[Any], kind: str) -> bytes:
    return np.ascontiguousarray(values, dtype=kind).tobytes()


def _int32(encoded: bytes) -> NDArray[np.int32]:
    return np.frombuffer(encoded, "<i4").astype(np.int32)


def _text(text: str) -> bytes:
    return well_formed(text).encode()


def _str(encoded: bytes) -> str:
    return encoded.decode()
