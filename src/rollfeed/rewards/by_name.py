"""Reward functions that are called by the names of their parameters.

``def reward(response, label)`` gets what it names: ``response``, ``label``, ``metadata``, ``sample``, ``prompt``, an
entry of the metadata, or the column of the labels. One with a parameter ``completions`` is called as TRL calls them:
with lists, ``completions``, ``prompts``, ``completion_ids`` and the columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from functools import partial, wraps
from typing import Any

import numpy as np

from rollfeed.answers import without_end_token
from rollfeed.base.importing import is_async
from rollfeed.errors import RewardError, suggestion
from rollfeed.types import Prompt, Sample

_OF_A_SAMPLE = ("response", "label", "metadata", "sample", "prompt")
_OF_SEVERAL = ("completions", "prompts", "completion_ids")


class Takes(StrEnum):
    """The arguments that a reward function is called with."""

    SAMPLE = "sample"
    """A sample and its prompt."""
    SAMPLES = "samples"
    """Samples, and a prompt for each."""
    GROUP = "group"
    """Samples, and the prompt of them all."""


def by_name(function: Any, *, takes: Takes, label_names: Collection[str] = ()) -> Any:
    """Return a function as the hub calls it; one whose parameters do not name what they are for is as it was.

    ``takes`` is what the hub calls it with, and ``label_names`` are columns by which it may ask for labels.
    """
    parameters = _parameters(function)
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes_several = "completions" in names
    if not takes_several and not (takes is Takes.SAMPLE and _is_of_a_sample(names)):
        return function

    def arguments(first: Any, second: Any) -> dict[str, Any]:
        samples: Sequence[Sample] = [first] if takes is Takes.SAMPLE else first
        prompts: Sequence[Prompt] = second if takes is Takes.SAMPLES else [second] * len(samples)
        if takes_several:
            return _chosen(_lists(samples, prompts, label_names), parameters)
        return _chosen(_single(samples[0], prompts[0], label_names), parameters)

    def result(given: Any) -> Any:
        if not takes_several or takes is not Takes.SAMPLE:
            return given
        given = given.tolist() if isinstance(given, np.ndarray) else given
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 1:
            raise RewardError(f"it returned {given!r:.80} for one completion; it must be a list of one reward")
        return given[0]

    called = _called(function, arguments, result)
    known = {"label", *label_names, *(_OF_SEVERAL if takes_several else _OF_A_SAMPLE)}
    called.missing_in = partial(_missing, parameters, known)
    return called


def missing_argument(function: Any, prompt: Prompt) -> str | None:
    """Return why a function that :func:`by_name` made cannot be called for a prompt's samples; None for any other."""
    missing_in: Callable[[Collection[str]], str | None] | None = getattr(function, "missing_in", None)
    return None if missing_in is None else missing_in(prompt.metadata.keys())


def _missing(parameters: Sequence[inspect.Parameter], known: Collection[str], further: Collection[str]) -> str | None:
    for each in parameters:
        is_needed = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if is_needed and each.name not in known and each.name not in further:
            return (
                f"it asks for {each.name!r}, which this row has not: {suggestion(each.name, {*known, *further})}; a "
                "column comes by its name from label_key and metadata_columns of the data set"
            )
    return None


def _called(function: Any, arguments: Callable[[Any, Any], dict[str, Any]], result: Callable[[Any], Any]) -> Any:
    if is_async(function):

        @wraps(function)
        async def called_later(first: Any, second: Any) -> Any:
            return result(await function(**arguments(first, second)))

        return called_later

    @wraps(function)
    def called(first: Any, second: Any) -> Any:
        return result(function(**arguments(first, second)))

    return called


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not callable, which is told elsewhere, or a built-in
        return []


def _is_of_a_sample(names: Sequence[str]) -> bool:
    if {"response", "label", "metadata"}.intersection(names):
        return True
    return bool(names) and {"sample", "prompt"}.issuperset(names) and list(names) != ["sample", "prompt"]


def _metadata(sample: Sample, prompt: Prompt) -> Mapping[str, Any]:
    return sample.metadata or prompt.metadata


def _single(sample: Sample, prompt: Prompt, label_names: Collection[str]) -> dict[str, Any]:
    metadata = _metadata(sample, prompt)
    return {
        **dict.fromkeys(label_names, prompt.label),
        **metadata,
        "response": without_end_token(sample.response),
        "label": prompt.label,
        "metadata": metadata,
        "sample": sample,
        "prompt": prompt,
    }


def _lists(samples: Sequence[Sample], prompts: Sequence[Prompt], label_names: Collection[str]) -> dict[str, Any]:
    texts = [without_end_token(sample.response) for sample in samples]
    labels = [prompt.label for prompt in prompts]
    rows = [_metadata(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)]
    columns = dict.fromkeys(name for row in rows for name in row)
    return {
        **dict.fromkeys([*label_names, "label"], labels),
        **{name: [row.get(name) for row in rows] for name in columns},
        "prompts": [prompt.text if prompt.messages is None else list(prompt.messages) for prompt in prompts],
        "completions": [
            text if prompt.messages is None else [{"role": "assistant", "content": text}]
            for text, prompt in zip(texts, prompts, strict=True)
        ],
        "completion_ids": [sample.response_token_ids.tolist() for sample in samples],
    }


def _chosen(known: Mapping[str, Any], parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """Return what the parameters ask for. Raises RewardError for what is not known."""
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        chosen = dict(known)
    else:
        chosen = {each.name: known[each.name] for each in parameters if each.name in known}
    if (problem := _missing(parameters, known, ())) is not None:
        raise RewardError(problem)
    return chosen
