"""Our samples as slime's, and back: what a plug-in did to one is read, checked, and becomes a sample of ours.

Invariant: a token that is trained on has the logprob and the version that the engine gave it in that context, or the
logprob that the plug-in says; it is never made up.

Axes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample
from rollfeed.compat.slime_plugins.shared_run import Sent
from rollfeed.compat.slime_plugins.slime_paths import REWARD_FN, SLIME, paths_of
from rollfeed.protocols import OWN_CONTEXT, RolloutRequest
from rollfeed.types import (
    Correct,
    Prompt,
    RoutedExperts,
    Sample,
    SampleStatus,
    SamplingMask,
    SamplingParams,
    VersionSpan,
    joined_spans,
)

LOGPROB_TOLERANCE = 1e-4
"""What passing through JSON may change."""
_SAMPLE_ATTRIBUTES = ("tokens", "response", "response_length", "status", "loss_mask", "reward")
_NO_COUNTERPART = ("multimodal_train_inputs", "teacher_log_probs")
_GUARDED = ("group_index", "tokens", "response_length", "loss_mask", "rollout_log_probs", "status")


def is_slime_sample(made: Any) -> bool:
    """Whether something can be read as slime's ``Sample``, whoever's class it is."""
    return all(hasattr(made, name) for name in _SAMPLE_ATTRIBUTES)


def asked_sample(request: RolloutRequest, cls: type[SlimeSample]) -> SlimeSample:
    """Return what a generate function is handed: an unanswered sample, or one to be resumed."""
    if request.partial is not None:
        return slime_sample(request.partial, request.prompt, cls)
    prompt = request.prompt
    made = cls()
    made.group_index, made.index, made.rollout_id = request.group_index, request.index, request.rollout_id
    made.prompt, made.label = prompt.text, copy.deepcopy(prompt.label)
    made.metadata = _metadata(prompt.metadata, prompt)
    made.multimodal_inputs = {"images": list(prompt.images)} if prompt.images else None
    made.session_id = f"rollout-{request.rollout_id}"
    vars(made).update(paths_of(made.metadata))
    return made


def slime_sample(sample: Sample, prompt: Prompt | None, cls: type[SlimeSample]) -> SlimeSample:
    """Return a sample as slime has it; ``prompt`` is its text, where it is known."""
    made = cls()
    made.group_index, made.index, made.rollout_id = sample.group_index, sample.index, sample.rollout_id
    made.prompt = "" if prompt is None else prompt.text
    made.tokens = sample.token_ids.tolist()
    made.response, made.response_length = sample.response, sample.response_length
    made.label, made.reward = copy.deepcopy(sample.label), copy.deepcopy(sample.reward)
    weights = sample.loss_mask.tolist()
    made.loss_mask = [int(weight) if weight in (0.0, 1.0) else weight for weight in weights]
    made.rollout_log_probs = sample.logprobs.tolist()
    made.weight_versions = [str(span.policy_version) for span in sample.version_spans]
    made.status = cls.Status(sample.status.value)
    made.metadata = _metadata(sample.metadata, prompt)
    made.multimodal_inputs = {"images": list(sample.images)} if sample.images else None
    made.remove_sample, made.non_generation_time = sample.remove_sample, sample.non_generation_seconds
    made.prefix_cache_info.cached_tokens = sample.cached_tokens
    made.session_id = f"rollout-{sample.rollout_id}"
    vars(made).update(paths_of(made.metadata) | copy.deepcopy(dict(sample.extra)))
    return made


def _metadata(metadata: Mapping[str, Any], prompt: Prompt | None) -> dict[str, Any]:
    tools = {} if prompt is None or prompt.tools is None else {"tools": list(prompt.tools)}
    return copy.deepcopy({**tools, **metadata})


def guarded(samples: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return what a function that only looks at samples must leave as it is."""
    return [tuple(copy.copy(getattr(sample, name)) for name in _GUARDED) for sample in samples]


def changed(samples: Sequence[Any], before: Sequence[tuple[Any, ...]]) -> str | None:
    """Return which of those it changed, or None."""
    for sample, values in zip(samples, before, strict=True):
        for name, value in zip(_GUARDED, values, strict=True):
            if getattr(sample, name) != value:
                return f"changed {name} of sample {sample.index}: it may look at samples, and set nothing but metadata"
    return None


def own_sample(made: Any, request: RolloutRequest, sent: Sequence[Sent], *, policy_version: int) -> Sample:
    """Return what a plug-in made of a sample as one of ours.

    Args:
        made: slime's ``Sample``.
        request: The answering that it is for.
        sent: What the engine was asked for it, with its answers.
        policy_version: Of tokens of which nobody knows it.

    Raises:
        ValueError: If it cannot be trained on; says what is wrong.
    """
    for name in _NO_COUNTERPART:
        if getattr(made, name, None) is not None:
            raise ValueError(f"a sample with {name}, which has no counterpart here: leave it None")
    if made.group_index not in (None, request.group_index):
        raise ValueError(f"a sample of group {made.group_index} for one of group {request.group_index}")
    if made.label != request.prompt.label and made.reward is None:
        raise ValueError("a sample whose label is another than its prompt's: graders compare with the prompt's")
    ids, length = _tokens(made, request), _length(made)
    num_prompt = len(ids) - length
    if num_prompt < 0:
        raise ValueError(
            f"a sample with response_length = {length} and {len(ids)} tokens, those of the prompt included"
        )
    mask = _values(made.loss_mask, length, "loss_mask", otherwise=1.0)
    sampled, is_known, versions, drawn_from, precision = _as_sampled(ids, num_prompt, sent, request.partial)
    logprobs = _checked_logprobs(made, mask, sampled, is_known)
    experts = _experts(ids, sent, request.partial)
    if experts is None and getattr(made, "rollout_routed_experts", None) is not None:
        raise ValueError("a sample with rollout_routed_experts, which no reply had: leave it None")
    metadata = {key: value for key, value in made.metadata.items() if key != "tools" or request.prompt.tools is None}
    if not np.array_equal(ids[: len(request.prompt.token_ids)], request.prompt.token_ids):
        metadata[OWN_CONTEXT] = True
    rm_path = getattr(made, "custom_rm_path", None)
    if rm_path is not None:
        metadata[REWARD_FN] = f"{SLIME}{rm_path}"
    reward = made.reward
    return Sample(
        token_ids=ids,
        response_length=length,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=_spans(versions, policy_version),
        status=SampleStatus(getattr(made.status, "value", made.status)),
        group_index=request.group_index,
        index=request.index,
        rollout_id=request.rollout_id,
        response=made.response,
        label=made.label,
        reward=reward.item() if isinstance(reward, np.generic) else reward,
        metadata=metadata,
        images=request.prompt.images,
        non_generation_seconds=float(made.non_generation_time),
        cached_tokens=sum(each.completion.cached_tokens for each in sent),
        precision=precision,
        sampling_mask=SamplingMask.of(drawn_from) if request.params.return_sampling_mask else None,
        remove_sample=bool(made.remove_sample),
        routed_experts=experts,
    )


def changed_sample(made: Any, sample: Sample, prompt: Prompt) -> Sample:
    """Return one of our samples with what a plug-in changed in slime's form of it.

    Raises:
        ValueError: As :func:`own_sample`.
    """
    request = RolloutRequest(
        prompt=prompt,
        params=SamplingParams(max_new_tokens=0),
        group_index=sample.group_index,
        index=sample.index,
        rollout_id=sample.rollout_id,
        step=0,
        max_context_length=len(sample.token_ids),
        partial=sample,
    )
    read = own_sample(made, request, (), policy_version=sample.oldest_version or 0)
    is_same = np.array_equal(read.token_ids, sample.token_ids)
    return replace(
        read,
        cached_tokens=sample.cached_tokens,
        precision=sample.precision,
        images=sample.images,
        extra=sample.extra,
        correct=sample.correct if read.reward == sample.reward else Correct.UNDEFINED,
        sampling_mask=sample.sampling_mask if is_same else None,
        state=sample.state,
    )


def _tokens(made: Any, request: RolloutRequest) -> NDArray[np.int32]:
    tokens = made.tokens
    if tokens is None or len(tokens) == 0:
        return request.prompt.token_ids
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"a sample whose tokens are {tokens!r:.80}; they must be a list of token ids")
    return ids.astype(np.int32)


def _length(made: Any) -> int:
    length = made.response_length
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 0:
        raise ValueError(f"a sample with response_length = {length!r:.80}; it must be a number of tokens")
    return int(length)


def _values(given: Any, length: int, name: str, *, otherwise: float) -> NDArray[np.float32]:
    if given is None:
        return np.full(length, otherwise, np.float32)
    values = np.asarray(given, np.float32)
    if values.shape != (length,):
        raise ValueError(f"a sample with {len(given)} entries in {name} and response_length = {length}")
    return values


def _as_sampled(
    ids: NDArray[np.int32], num_prompt: int, sent: Sequence[Sent], partial: Sample | None
) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.int64], list[NDArray[np.int32]], str]:
    """Return logprobs of response tokens, whether they were sampled, versions, -1 where not known, and the precision.

    All ``(R,)``, and before the last what each token was drawn from, nothing where nobody asked. A token was sampled
    where the engine was sent what is before it, and said it.
    """
    logprobs, is_known = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.bool_)
    versions, precisions = np.full(len(ids), -1, np.int64), set[str]()
    drawn_from = [np.empty(0, np.int32)] * len(ids)
    if partial is not None and np.array_equal(partial.token_ids, ids[: len(partial.token_ids)]):
        place = slice(partial.prompt_length, len(partial.token_ids))
        logprobs[place], is_known[place] = partial.logprobs, partial.loss_mask > 0
        _mark(versions[place], partial.version_spans)
        if partial.sampling_mask is not None:
            drawn_from[place] = partial.sampling_mask.split()
        precisions.update(filter(None, partial.precision.split("+")))
    for prompt_ids, completion in sent:
        start = len(prompt_ids)
        new = completion.token_ids[: max(0, len(ids) - start)]
        if not len(new) or not np.array_equal(ids[:start], prompt_ids):
            continue
        same = ids[start : start + len(new)] == new
        count = len(new) if same.all() else int(np.argmin(same))
        place = slice(start, start + count)
        logprobs[place], is_known[place] = completion.logprobs[:count], True
        _mark(versions[place], completion.version_spans)
        if completion.sampling_mask is not None:
            drawn_from[place] = completion.sampling_mask.split()[:count]
        precisions.add(completion.precision)
    known = (logprobs[num_prompt:], is_known[num_prompt:], versions[num_prompt:], drawn_from[num_prompt:])
    return *known, "+".join(sorted(precisions))


def _experts(ids: NDArray[np.int32], sent: Sequence[Sent], partial: Sample | None) -> RoutedExperts | None:
    """Return the experts of a sample's tokens, as far as the engine has computed these in their context."""
    computed = [] if partial is None else [(partial.token_ids, partial.routed_experts)]
    for prompt_ids, completion in sent:
        computed.append((np.concatenate([prompt_ids, completion.token_ids]), completion.routed_experts))
    parts = []
    for text, experts in computed:
        length = min(len(text), len(ids))
        is_same = text[:length] == ids[:length]
        # What stands behind a token does not change its experts.
        num_same = length if is_same.all() else int(np.argmin(is_same))
        if experts is not None and num_same:
            parts.append(RoutedExperts.of(experts.numbers[:num_same]))
    joined = RoutedExperts.joined(parts)
    return joined if joined is None else RoutedExperts.of(joined.numbers[: len(ids) - 1])


def _mark(versions: NDArray[np.int64], spans: Iterable[VersionSpan]) -> None:
    for span in spans:
        versions[span.start : span.end] = span.policy_version


def _checked_logprobs(
    made: Any, mask: NDArray[np.float32], sampled: NDArray[np.float32], is_known: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the sample's logprobs ``(R,)``, those of the engine where it brings none."""
    is_trained = mask > 0
    if made.rollout_log_probs is None:
        if (is_trained & ~is_known).any():
            position = int(np.argmax(is_trained & ~is_known))
            raise ValueError(
                f"a sample without rollout_log_probs whose response token {position} is trained on and was not sampled "
                "in that context: keep the tokens of the engine's replies, or give it loss_mask 0"
            )
        return sampled
    given = _values(made.rollout_log_probs, len(mask), "rollout_log_probs", otherwise=0.0)
    differing = is_trained & is_known & (np.abs(given - sampled) > LOGPROB_TOLERANCE)
    if differing.any():
        position = int(np.argmax(differing))
        raise ValueError(
            f"a sample with rollout_log_probs[{position}] = {given[position]:g}, where the engine's reply says "
            f"{sampled[position]:g}: they belong to other tokens"
        )
    return given


def _spans(versions: NDArray[np.int64], otherwise: int) -> tuple[VersionSpan, ...]:
    """Return the spans of versions ``(R,)``; a token of which nobody knows it is of the turn before it."""
    known = versions[versions >= 0]
    last = int(known[0]) if len(known) else otherwise
    tokens: list[tuple[int, tuple[VersionSpan]]] = []
    for version in versions.tolist():
        last = last if version < 0 else version
        tokens.append((1, (VersionSpan(0, 1, last),)))
    return joined_spans(tokens)
