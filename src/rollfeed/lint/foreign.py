"""Records of other programs, each as the samples that it holds.

- rollfeed's own dictionary form, as a gateway writes it;
- slime's saved rollouts (``--save-debug-rollout-data``);
- traces of verifiers, as prime-rl saves them: a graph of messages with their tokens; and its rows of before, flat or
  with a trajectory;
- rows of text, as verl (``trainer.rollout_data_dir``) and others write them.

Axes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rollfeed.lint.across import hides_zeros
from rollfeed.lint.findings import SamplePlace
from rollfeed.lint.subject import Subject, ids_of, numbers_of
from rollfeed.types import SampleStatus

Record: TypeAlias = Mapping[str, Any]
_PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "prompts")
_RESPONSE_IDS = ("completion_ids", "completion_token_ids", "response_ids", "responses")
_MASKS = ("completion_mask", "response_mask", "loss_mask")
_LOGPROBS = ("completion_logprobs", "rollout_log_probs", "logprobs", "old_log_probs")
_TEXTS = (("input", "output"), ("prompt", "completion"), ("prompt", "response"))
_STATUS_OF = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}


def subjects_of(record: Record, source: str) -> Iterator[Subject]:
    """Yield the samples of a record, given where it stands.

    Raises:
        ValueError: If it is in none of the forms, or broken; says what is wrong.
    """
    for keys, read in _FORMS:
        if all(record.get(key) is not None for key in keys):
            try:
                yield from read(record, source)
            except (TypeError, KeyError, AttributeError, IndexError) as error:
                raise ValueError(f"{type(error).__name__}: {error}") from None
            return
    raise ValueError(f"no samples of rollfeed, slime, prime-rl or verl: it has {', '.join(map(repr, record))[:200]}")


def _own(record: Record, source: str) -> Iterator[Subject]:
    drawn_from = record.get("sampling_mask")
    group, rollout = record.get("group_index"), record.get("rollout_id")
    logprobs = numbers_of(record.get("logprobs"))
    mask = numbers_of(record.get("loss_mask"))
    yield Subject(
        place=SamplePlace(source, group, rollout, record.get("index")),
        token_ids=ids_of(record["token_ids"]),
        response_length=int(record["response_length"]),
        loss_mask=mask,
        logprobs=logprobs,
        spans=[(int(start), int(end), int(version)) for start, end, version in record.get("version_spans") or ()],
        status=_status(record.get("status")),
        rollout=None if rollout is None else (group, rollout),
        is_removed=bool(record.get("remove_sample")),
        metadata=record.get("metadata") or {},
        sampling_mask=None if drawn_from is None else (ids_of(drawn_from["lengths"]), ids_of(drawn_from["token_ids"])),
    )


def _slime(record: Record, source: str) -> Iterator[Subject]:
    rollout, logprobs = record.get("rollout_id"), numbers_of(record.get("rollout_log_probs"))
    status = _status(record.get("status"))
    versions = [int(each) for each in record.get("weight_versions") or () if str(each).isdigit()]
    yield Subject(
        place=SamplePlace(source, record.get("group_index"), rollout, record.get("index")),
        token_ids=ids_of(record["tokens"]),
        response_length=int(record["response_length"]),
        loss_mask=numbers_of(record.get("loss_mask")),
        logprobs=logprobs,
        versions=versions,
        status=status,
        rollout=rollout,
        is_removed=bool(record.get("remove_sample")),
        is_taught=logprobs is None and status is SampleStatus.PENDING,
        has_rounded_logprobs=logprobs is not None and hides_zeros(logprobs),
    )


def _flat(record: Record, source: str) -> Iterator[Subject]:
    prompt_P, response_R = ids_of(_first(record, _PROMPT_IDS)), ids_of(_first(record, _RESPONSE_IDS))
    logprobs = numbers_of(_first(record, _LOGPROBS))
    is_cut = record.get("is_truncated")
    spans = None
    if record.get("policy_version") is not None:
        spans = [(0, len(response_R), int(record["policy_version"]))] if len(response_R) else []
    yield Subject(
        place=SamplePlace(source, record.get("example_id"), record.get("rollout_id"), record.get("index")),
        token_ids=np.concatenate([prompt_P, response_R]),
        response_length=len(response_R),
        loss_mask=numbers_of(_first(record, _MASKS)),
        logprobs=logprobs,
        spans=spans,
        status=None if is_cut is None else SampleStatus.TRUNCATED if is_cut else SampleStatus.COMPLETED,
        has_rounded_logprobs=logprobs is not None and hides_zeros(logprobs),
    )


def _trajectory(record: Record, source: str) -> Iterator[Subject]:
    steps = [step for step in record["trajectory"] if step.get("tokens")]
    if not steps:
        yield from _text(record, source)
    for number, step in enumerate(steps):
        yield from _flat({**record, **step["tokens"], "index": number}, source)


def _trace(record: Record, source: str) -> Iterator[Subject]:
    """Yield a sample a branch; what several have in common counts as trained in the first."""
    nodes = record["nodes"]
    reasons = {call.get("node"): call.get("finish_reason") for call in record.get("calls") or ()}
    parents = {node.get("parent") for node in nodes}
    seen: set[int] = set()
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path: list[int] = []
        ahead: int | None = leaf
        while ahead is not None and len(path) <= len(nodes):
            path.append(ahead)
            ahead = nodes[ahead].get("parent")
        path.reverse()
        if not any(nodes[number].get("token_ids") for number in path):
            yield Subject(
                place=SamplePlace(source, sample=leaf), texts=_trace_texts([nodes[number] for number in path])
            )
            continue
        yield _branch(nodes, path, seen, place=SamplePlace(source, sample=leaf), reason=reasons.get(path[-1]))
        seen.update(path)


def _branch(
    nodes: Sequence[Record], path: Sequence[int], seen: set[int], *, place: SamplePlace, reason: Any
) -> Subject:
    ids: list[int] = []
    weights: list[float] = []
    told: list[bool] = []
    logprobs: list[float] = []
    for number in path:
        node = nodes[number]
        mask, own = [bool(each) for each in node.get("mask") or ()], iter(node.get("logprobs") or ())
        ids += node.get("token_ids") or ()
        weights += [float(each and number not in seen) for each in mask]
        told += [not node.get("sampled")] * len(mask)
        logprobs += [next(own, np.nan) if each else 0.0 for each in mask]
    if len(weights) != len(ids):
        return Subject(place=place, token_ids=ids_of(ids), response_length=len(ids), loss_mask=numbers_of(weights))
    start = next((at for at, weight in enumerate(weights) if weight), len(weights))
    return Subject(
        place=place,
        token_ids=ids_of(ids),
        response_length=len(ids) - start,
        loss_mask=np.array(weights[start:], np.float32),
        logprobs=np.array(logprobs[start:], np.float32),
        told=np.array(told[start:], np.bool_),
        status=_status(_STATUS_OF.get(str(reason))),
        has_rounded_logprobs=True,
    )


def _text(record: Record, source: str) -> Iterator[Subject]:
    for asked, said in _TEXTS:
        if record.get(asked) is not None and record.get(said) is not None:
            texts = {"prompt": _shown(record[asked]), "response": _shown(record[said])}
            yield Subject(place=SamplePlace(source, record.get("example_id"), sample=record.get("index")), texts=texts)
            return


def _trace_texts(path: Sequence[Record]) -> dict[str, str]:
    messages = [node["message"] for node in path]
    first = next((at for at, node in enumerate(path) if node.get("sampled")), len(path))
    return {"prompt": _shown(messages[:first]), "response": _shown(messages[first:])}


def _shown(content: Any) -> str:
    """Return a text, or the texts of messages."""
    if isinstance(content, list):
        return "\n".join(str(each.get("content") or "") if isinstance(each, Mapping) else str(each) for each in content)
    return str(content)


def _first(record: Record, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _status(told: Any) -> SampleStatus | None:
    return SampleStatus(str(getattr(told, "value", told))) if told is not None else None


_Read: TypeAlias = Callable[[Record, str], Iterator[Subject]]
_FORMS: tuple[tuple[tuple[str, ...], _Read], ...] = (
    (("token_ids", "response_length"), _own),
    (("tokens", "response_length"), _slime),
    (("nodes",), _trace),
    (("trajectory",), _trajectory),
    *(((prompt, response), _flat) for prompt in _PROMPT_IDS for response in _RESPONSE_IDS),
    *((texts, _text) for texts in _TEXTS),
)
"""Keys that a record of a form has, and what reads it."""
