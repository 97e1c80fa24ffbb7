"""One sample whole, with its tokens, as JSON values."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rollfeed.errors import ConfigError
from rollfeed.evaluation import ANSWERS_SCHEMA
from rollfeed.prompts.pictures.picture_folder import file_name
from rollfeed.store import RunReader
from rollfeed.store.layout import ANSWERS_FILE, PICTURES
from rollfeed.store.tables.parquet import read_columns
from rollfeed.types import Picture
from rollfeed.types.fields import from_dict, to_dict
from rollfeed.viewer.found_runs import is_evaluation
from rollfeed.viewer.sample_rows import id_of
from rollfeed.viewer.token_texts import RunTokenizers, TokenTexts

_PLAIN = (
    *("prompt_id", "source", "prompt", "status", "reward", "correct", "extracted", "outcome", "detail", "error"),
    *("response", "precision", "penalty", "drop_reason", "policy_version", "remove_sample", "response_length"),
)
_JSON = ("messages", "prompt_label", "label", "rewards", "metadata", "prompt_metadata", "tools")
_SHOWN_TYPES = ("image/png", "image/jpeg", "image/webp")
_LARGEST_SHOWN = 4 << 20
_ROUNDED_DIGITS = 16
_OF_MEMBER = ("reward", "correct", "status", "response_length")


def whole_sample(path: Path, sample: str, tokenizers: RunTokenizers) -> dict[str, Any]:
    """Return the sample that :func:`id_of` names, with those of its group in short; see :func:`whole_samples`."""
    return next(whole_samples(path, [sample], tokenizers))


def whole_samples(path: Path, samples: Sequence[str], tokenizers: RunTokenizers) -> Iterator[dict[str, Any]]:
    """Yield samples of an evaluation, or of one step of a run; their groups are read at once.

    ``tokens`` are texts, of the prompt and the response, of which ``num_prompt`` are the prompt's; ``logprobs`` are one
    a token of the response, ``mask`` and ``versions`` pairs of how many tokens in a row have which value;
    ``advantage`` is a number, or one a token.

    Raises:
        RollfeedError: If there is no such sample, or it cannot be read.
    """
    parsed = [_parsed(sample) for sample in samples]
    if is_evaluation(path):
        yield from _answers(
            path, {sample: (rest, first) for sample, (first, _, rest) in zip(samples, parsed, strict=True)}
        )
        return
    step = parsed[0][0]
    with RunReader(path) as reader:
        groups = reader.group_rows(*{group for _, group, _ in parsed}, step=step)
    for sample, (_, group_index, _) in zip(samples, parsed, strict=True):
        members = dict[int, int]()
        named = {}
        for row in groups[group_index]:
            member = members.setdefault(row["rollout_id"], len(members))
            named[id_of(step, group_index, member, row["index"], "")] = row
        if sample not in named:
            raise ConfigError(f"group {group_index} of step {step} has no sample {sample}")
        row = named[sample]
        yield {
            **_about(sample, step, group_index, named),
            **{name: row.get(name) for name in _PLAIN},
            **{name: _json(row[name]) for name in _JSON if row.get(name) is not None},
            **_pictures(row, path / PICTURES),
            **_tokens(row, tokenizers.of(path)),
        }


def _pictures(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the pictures of a sample with what they show; those that are large, or not there, without."""
    shown = [from_dict(Picture, each) for each in row.get("images") or row.get("prompt_images") or ()]
    return {"pictures": [{**to_dict(each), "shown": _data_uri(each, folder / file_name(each))} for each in shown]}


def _data_uri(picture: Picture, path: Path) -> str | None:
    if picture.media_type not in _SHOWN_TYPES or not path.is_file() or path.stat().st_size > _LARGEST_SHOWN:
        return None
    content = path.read_bytes()
    # The name comes from the run, and may lead anywhere.
    if hashlib.sha256(content).hexdigest() != picture.content_hash:
        return None
    return f"data:{picture.media_type};base64,{base64.b64encode(content).decode()}"


def _parsed(sample: str) -> tuple[int, int, str]:
    try:
        first, second, rest = sample.split(".", 2)
        numbers = int(first), int(second)
    except ValueError:
        raise ConfigError(f"{sample!r} names no sample") from None
    return (*numbers, rest)


def _json(text: str) -> Any:
    """Return a JSON value, in which whole numbers that a browser would round are texts."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < _ROUNDED_DIGITS else digits)


def _about(sample: str, step: int | None, group: int, named: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    members = [{"id": name, **{key: row[key] for key in _OF_MEMBER}} for name, row in named.items()]
    return {"id": sample, "step": step, "group": group, "members": members}


def _tokens(row: Mapping[str, Any], known: TokenTexts | None) -> dict[str, Any]:
    if row["token_ids"] is None:
        return _no_tokens("")
    ids, advantage = row["token_ids"].tolist(), row.get("advantage")
    return {
        "tokens": [f"⟨{token}⟩" for token in ids] if known is None else known.texts(ids),
        "has_texts": known is not None,
        "num_prompt": len(ids) - row["response_length"],
        "mask": _in_a_row(row["loss_mask"]),
        "logprobs": np.round(row["logprobs"].astype(np.float64), 4).tolist(),
        "versions": [[span["end"] - span["start"], span["policy_version"]] for span in row["spans"]],
        "advantage": np.round(advantage, 5).tolist() if isinstance(advantage, np.ndarray) else advantage,
    }


def _no_tokens(text: str) -> dict[str, Any]:
    """Return a response of which only the text is known."""
    numbers: dict[str, Any] = {"mask": [], "logprobs": [], "versions": [], "advantage": None}
    return {"tokens": [text], "has_texts": True, "num_prompt": 0, **numbers}


def _in_a_row(values: NDArray[np.float32]) -> list[list[float]]:
    starts = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)
    counts = np.diff([*starts.tolist(), len(values)])
    return [[int(count), round(float(value), 4)] for count, value in zip(counts, values[starts], strict=True)]


def _answers(path: Path, samples: Mapping[str, tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield answers by what names them, with the set and index of their prompt."""
    sources, indices = map(set, zip(*samples.values(), strict=True))
    asked = pc.field("index").isin(list(indices)) & pc.field("set").isin(list(sources))
    groups: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in read_columns(path / ANSWERS_FILE, ANSWERS_SCHEMA.names, asked, is_versioned=False):
        row["correct"] = {True: "yes", False: "no", None: "undefined"}[row["correct"]]
        name = id_of(None, row["index"], row["answer"], None, row["set"])
        groups.setdefault((row["set"], row["index"]), {})[name] = row
    for sample, group in samples.items():
        named = groups.get(group, {})
        if sample not in named:
            raise ConfigError(f"{path}: has no answer {sample}")
        row = named[sample]
        texts = {name: _json(row[name] or "null") for name in ("label", "messages")}
        about = {**row, "source": row["set"], **texts}
        yield {**about, **_about(sample, None, row["index"], named), **_no_tokens(row["response"] or "")}
