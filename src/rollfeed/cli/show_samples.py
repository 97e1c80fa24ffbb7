"""Samples and groups as `rollfeed show` prints them: those that were found, one whole, or a group whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console

from rollfeed.cli.shown import cut_start, fitted, json_text, one_line, print_line, print_section, print_table
from rollfeed.errors import RunDirectoryError
from rollfeed.prompts.pictures.picture_folder import file_name
from rollfeed.store import FoundGroup, question_of
from rollfeed.store.finding import FoundSample
from rollfeed.store.layout import PICTURES
from rollfeed.types import Correct, Rollout, Sample, SampleStatus
from rollfeed.types.fields import to_dict
from rollfeed.types.text import counted

_VERDICT = ("correct", "format_ok", "extracted", "outcome", "detail")
_INDENT = 10
_MOST_PARTS = 40
Advantages: TypeAlias = Mapping[int, float | list[float]]
"""By the index of a sample: a number, or one a token."""


def found_view(found: Sequence[FoundSample], *, has_more: bool) -> dict[str, Any]:
    """Return samples that were found as JSON values."""
    return {"samples": [asdict(each) for each in found], "has_more": has_more}


def group_view(found: FoundGroup, member: int | None, advantages: Advantages) -> dict[str, Any]:
    """Return one group as JSON values: prompt, texts, rewards and token counts, of all members or one.

    The samples of one have ``parts``: the stretches of equal kind.

    Raises:
        RunDirectoryError: If the group has no such member.
    """
    group, prompt = found.group, found.group.prompt
    return {
        "step": found.step,
        "group_index": group.group_index,
        "kept": found.drop_reason is None,
        "drop_reason": found.drop_reason,
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "question": question_of(prompt.text, prompt.messages or ()),
        "prompt": prompt.text,
        "prompt_tokens": len(prompt.token_ids),
        "messages": prompt.messages,
        "images": [to_dict(picture) for picture in prompt.images],
        "label": prompt.label,
        "metadata": prompt.metadata,
        "samples": [
            {
                **_sample_view(rollout, sample),
                "member": number,
                "advantage": None if sample is None else advantages.get(sample.index),
                **({} if member is None or sample is None else {"parts": list(_parts(sample))}),
            }
            for number, rollout in _members(found, member)
            for sample in rollout.samples or (None,)
        ],
    }


def _sample_view(rollout: Rollout, sample: Sample | None) -> dict[str, Any]:
    return {
        "index": sample.index if sample else None,
        "rollout_id": rollout.rollout_id,
        "status": sample.status if sample else SampleStatus.FAILED,
        "response": sample.response if sample else "",
        "response_length": sample.response_length if sample else 0,
        "trained_tokens": int((sample.loss_mask > 0).sum()) if sample and not sample.remove_sample else 0,
        "reward": sample.reward if sample else None,
        **{name: getattr(rollout.verdict, name, None) for name in _VERDICT},
        "error": rollout.error,
        "seconds": rollout.seconds,
        "policy_versions": sorted({span.policy_version for span in sample.version_spans}) if sample else [],
        "metadata": sample.metadata if sample else {},
    }


def _parts(sample: Sample) -> Iterator[dict[str, Any]]:
    """Yield the stretches of a response that one version made and that are all trained on, or all not."""
    length = sample.response_length
    versions = np.zeros(length, np.int64)
    for span in sample.version_spans:
        versions[span.start : span.end] = span.policy_version
    is_trained = sample.loss_mask > 0
    changes = np.flatnonzero(np.diff(is_trained.astype(np.int8)) | (np.diff(versions) != 0)) + 1
    bounds = [0, *changes.tolist(), length] if length else []
    for start, end in pairwise(bounds):
        logprobs = sample.logprobs[start:end]
        yield {
            "start": start,
            "end": end,
            "is_trained": bool(is_trained[start]) and not sample.remove_sample,
            "policy_version": int(versions[start]),
            "logprob_mean": float(logprobs.mean()),
            "logprob_min": float(logprobs.min()),
        }


def print_found(to: Console, found: Sequence[FoundSample], *, has_more: bool, is_whole: bool = False) -> None:
    """Print samples that were found, each in a few lines or with its texts whole."""
    if not found:
        print_line(to, "no sample is like that")
    for each in found:
        where = "" if each.step is None else f" of step {each.step}"
        parts = [f"{each.group_index}.{each.member}{where}", each.source, each.status.value]
        parts += [counted(each.response_length, "token")]
        parts += ["not scored" if each.reward is None else f"reward {each.reward:.4g}", *_right_or_wrong(each.correct)]
        parts += [] if each.drop_reason is None else [f"dropped: {each.drop_reason}"]
        print_line(to, ", ".join(parts), style="bold")
        about = (
            []
            if is_whole
            else [
                ("asked", each.question),
                ("answered", cut_start(one_line(each.response), to.width - _INDENT)),
            ]
        )
        about += [] if each.label is None else [("expected", _text(each.label))]
        about += [(name, text) for name in ("extracted", "detail", "error") if (text := getattr(each, name))]
        for name, text in about:
            line = fitted(one_line(text), to.width - _INDENT).rstrip()
            print_line(to, f"{name:{_INDENT}}{line}")
        for name, text in [("asked", each.question), ("answered", each.response)] if is_whole else []:
            print_section(to, name, text)
    if found and not is_whole:
        print_line(to, f"one whole: --sample {found[0].group_index}.{found[0].member}" + "; more: --limit N" * has_more)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


def _right_or_wrong(correct: Correct | None) -> list[str]:
    return {Correct.YES: ["right"], Correct.NO: ["wrong"]}.get(correct, [])  # type: ignore[arg-type]  # None is none


def print_group(to: Console, found: FoundGroup, member: int | None, advantages: Advantages) -> None:
    """Print one group whole: the prompt and every response, or that of one member with what is known of its tokens.

    Raises:
        RunDirectoryError: If the group has no such member.
    """
    members, group, prompt = _members(found, member), found.group, found.group.prompt
    fate = "kept" if found.drop_reason is None else f"dropped: {found.drop_reason}"
    print_line(to, f"group {group.group_index} of step {found.step}, {fate}", style="bold")
    print_line(to, f"source {prompt.source}, prompt {prompt.prompt_id}, {counted(len(prompt.token_ids), 'token')}")
    print_line(to, f"label {json_text(prompt.label)}")
    if prompt.metadata:
        print_line(to, f"metadata {json_text(dict(prompt.metadata))}")
    print_section(to, "prompt", prompt.text)
    for number, picture in enumerate(prompt.images, start=1):
        size, name = f"{picture.width} x {picture.height}", f"{PICTURES}/{file_name(picture)}"
        print_line(to, f"picture {number}: {picture.source}, {size}, {name}")
    for number, rollout in members:
        for sample in rollout.samples or (None,):
            print_section(to, _sample_title(number, rollout, sample), sample.response if sample else "")
            if sample is not None and member is not None:
                _print_tokens(to, sample, advantages.get(sample.index))
                own = {name: each for name, each in sample.metadata.items() if prompt.metadata.get(name) != each}
                if own:
                    print_line(to, f"metadata of its own {json_text(own)}")
        if rollout.verdict is not None and rollout.verdict.detail:
            print_line(to, f"detail: {rollout.verdict.detail}")
        if rollout.error is not None:
            print_line(to, f"error: {rollout.error}", style="red")


def _print_tokens(to: Console, sample: Sample, advantage: float | list[float] | None) -> None:
    to.print()
    if advantage is not None:
        by_token = " on average" if isinstance(advantage, list) else ""
        print_line(to, f"advantage {np.mean(advantage):.4g}{by_token}")
    parts = list(_parts(sample))
    rows = [
        (
            f"{part['start']}-{part['end'] - 1}",
            "trained on" if part["is_trained"] else "not trained on",
            *(str(part["policy_version"]), f"{part['logprob_mean']:.3f}", f"{part['logprob_min']:.3f}"),
        )
        for part in parts[:_MOST_PARTS]
    ]
    print_table(to, ("tokens", "", "version", "mean logprob", "lowest"), rows, left=("",))
    if len(parts) > _MOST_PARTS:
        print_line(to, f"{len(parts) - _MOST_PARTS} more: --json")


def _sample_title(member: int, rollout: Rollout, sample: Sample | None) -> str:
    verdict = rollout.verdict
    parts = [f"member {member}", (sample.status if sample else SampleStatus.FAILED).value]
    if sample:
        parts += [counted(sample.response_length, "token")]
        parts += ["not scored" if sample.reward is None else f"reward {json_text(sample.reward)}"]
    if verdict:
        parts += _right_or_wrong(verdict.correct)
    if verdict and verdict.extracted is not None:
        parts.append(f"extracted {json_text(verdict.extracted)}")
    if sample and sample.remove_sample:
        parts.append("left out of the loss")
    return ", ".join(parts)


def _members(found: FoundGroup, member: int | None) -> list[tuple[int, Rollout]]:
    """Return the members that are asked for, with their numbers."""
    members = list(enumerate(found.group.rollouts))
    if member is None:
        return members
    if not 0 <= member < len(members):
        has = f"it has members 0 to {len(members) - 1}" if members else "it has none"
        raise RunDirectoryError(f"group {found.group.group_index} of step {found.step} has no member {member}; {has}")
    return [members[member]]
