"""Finding samples in the Parquet files of a run or an evaluation, by what stands in their columns.

Only the columns that are asked for are read, and texts of what was found alone. Newest steps come first.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby
from operator import and_, eq, ge, gt, itemgetter, le, lt, ne
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow.compute as pc

from rollfeed.errors import ConfigError, suggestion
from rollfeed.store.layout import BATCHES, DROPPED
from rollfeed.store.reader import FoundGroup, RunReader
from rollfeed.store.tables.parquet import least_value, read_columns
from rollfeed.store.tables.summaries import question_of
from rollfeed.types import Correct, SampleStatus

_NUMBERS = {"reward": "reward", "length": "response_length", "group": "group_index", "step": "step"}
_TEXTS = {
    **{name: name for name in ("source", "status", "correct", "prompt_id", "prompt", "response", "label")},
    **{name: name for name in ("extracted", "outcome", "detail", "error")},
    **{"finish": "status", "reason": "drop_reason"},
}
_FINISHES = {"stop": "completed", "length": "truncated", "abort": "aborted"}
"""Words of the engines for what the status says."""
_COMPARISONS = {"<=": le, ">=": ge, "!=": ne, "<": lt, ">": gt, "=": eq}
_OF_EVALUATION = {"group_index": "index", "rollout_id": "answer", "index": "answer", "source": "set"}
"""Columns of an evaluation's answers that are called otherwise."""
_KEYS = ("source", "group_index", "rollout_id", "index")
_SHOWN = (
    "reward",
    "correct",
    "status",
    "response_length",
    "prompt_id",
    "prompt",
    "response",
    "label",
    "extracted",
    "error",
    "messages",
)
_RIGHT = 1.0  # a reward, as evaluations count it by default
_Row: TypeAlias = dict[str, Any]
_SEPARATOR = re.compile(r'(?:,|\sand\s)(?=(?:[^"]*"[^"]*")*[^"]*$)')  # but within double quotes
_TERM = re.compile(r"\s*(\w+)\s*(?:(<=|>=|!=|==|[<>=~])\s*(.+?))?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSample:
    """One sample, without its tokens."""

    step: int | None
    """None in an evaluation."""
    group_index: int
    member: int
    """Number of its rollout in the group, from 0."""
    index: int | None
    """As the sample has it; None when the rollout failed without leaving one."""
    source: str
    prompt_id: str
    question: str
    response: str
    reward: float | None
    correct: Correct | None
    status: SampleStatus
    response_length: int
    label: Any
    extracted: str | None
    detail: str | None
    error: str | None
    drop_reason: str | None
    """None when the group was kept."""


class _Term(NamedTuple):
    """One condition: a column, how it is compared, and with what."""

    column: str
    compare: str
    value: float | str

    def holds(self, number: float) -> bool:
        return bool(_COMPARISONS[self.compare](number, self.value))

    def expression(self, *, of_evaluation: bool) -> pc.Expression:
        name = _OF_EVALUATION.get(self.column, self.column) if of_evaluation else self.column
        value: Any = self.value
        if self.column == "correct" and of_evaluation:  # a truth value there, or none
            value = {"yes": True, "no": False}.get(str(value))
            if value is None:
                return pc.field(name).is_null() if self.compare == "=" else pc.field(name).is_valid()
        if self.compare == "~":
            return pc.match_substring(pc.field(name), value, ignore_case=True)
        if self.column == "label":  # JSON there: a text has quotes, a number has not
            is_label = pc.field(name).isin([value, json.dumps(value, ensure_ascii=False)])
            return is_label if self.compare == "=" else ~is_label
        return _COMPARISONS[self.compare](pc.field(name), value)


_WORDS: Mapping[str, tuple[_Term, ...]] = {
    "truncated": (_Term("status", "=", SampleStatus.TRUNCATED.value),),
    "empty": (_Term("response_length", "=", 0.0),),
    **{word: () for word in ("wrong", "right", "failed", "unscored", "kept", "dropped")},
}
"""Conditions of one word; those without terms are met by what is read."""


class SampleFilter:
    """Conditions that all have to hold, as ``"reward<0.2, source=sums, dropped"``; all samples fulfil none.

    A condition compares a field with ``<``, ``<=``, ``>``, ``>=``, ``=`` or ``!=``, or asks with ``~`` whether a text
    has another one in it, in whatever case; or it is one of the words ``wrong``, ``right``, ``failed``, ``truncated``,
    ``empty``, ``unscored``, ``kept`` and ``dropped``. A text with a comma or "and" in it stands in double quotes. Where
    a grader does not say what is right, a reward of 1 is. Responses have to hold ``response``, too, if it is given.

    Raises:
        ConfigError: If a condition is none of these, or names an unknown field.
    """

    def __init__(self, *texts: str, response: str | None = None) -> None:
        self.terms = [] if response is None else [_Term("response", "~", response)]
        self.words: set[str] = set()
        for text in texts:
            for part in _SEPARATOR.split(text):
                self._add(text, part)
        self.columns = {term.column for term in self.terms}

    def _add(self, text: str, part: str) -> None:
        match = _TERM.fullmatch(part)
        if match is None:
            raise ConfigError(f"--filter {text!r}: write conditions such as reward<0.2, source=sums or wrong")
        name, compare, value = match[1], (match[2] or "").replace("==", "="), match[3]
        if not compare:
            if name not in _WORDS:
                raise ConfigError(f"--filter {text!r}: no condition {name!r}; {suggestion(name, _WORDS)}")
            self.terms += _WORDS[name]
            self.words.add(name)
        elif name in _NUMBERS and compare != "~":
            try:
                self.terms.append(_Term(_NUMBERS[name], compare, float(value)))
            except ValueError:
                raise ConfigError(f"--filter {text!r}: {name} is compared with a number, not with {value!r}") from None
        elif name in _TEXTS and compare in ("=", "!=", "~"):
            bare = value.strip("\"'")
            if name == "correct" and (compare == "~" or bare not in set(Correct)):
                raise ConfigError(f"--filter {text!r}: correct is one of {', '.join(Correct)}: correct=no")
            self.terms.append(_Term(_TEXTS[name], compare, _FINISHES.get(bare, bare) if name == "finish" else bare))
        elif name in _NUMBERS or name in _TEXTS:
            raise ConfigError(f"--filter {text!r}: {name} cannot be compared by {compare}; use {_allowed(name)}")
        else:
            raise ConfigError(f"--filter {text!r}: no field {name!r}; {suggestion(name, [*_NUMBERS, *_TEXTS])}")

    def folders(self) -> Sequence[str]:
        """Return where what it asks for may be: among kept groups, dropped ones, or both."""
        if "dropped" in self.words or "drop_reason" in self.columns:
            return () if "kept" in self.words else (DROPPED,)
        return (BATCHES,) if "kept" in self.words else (BATCHES, DROPPED)

    def has_step(self, step: int) -> bool:
        """Whether samples of a step may be asked for."""
        return all(term.holds(step) for term in self.terms if term.column == "step")

    def expression(self, *, of_evaluation: bool) -> pc.Expression | None:
        """Return what rows of a file have to fulfil; None where all do."""
        found = [term.expression(of_evaluation=of_evaluation) for term in self.terms if term.column != "step"]
        for word, of_grader, by_reward in (("wrong", Correct.NO, lt), ("right", Correct.YES, ge)):
            if word in self.words:
                told = _Term("correct", "=", of_grader.value).expression(of_evaluation=of_evaluation)
                unsaid = pc.field("correct") == Correct.UNDEFINED.value
                found.append(told if of_evaluation else told | (unsaid & by_reward(pc.field("reward"), _RIGHT)))
        if "failed" in self.words:
            found.append((pc.field("status") == SampleStatus.FAILED.value) | pc.field("error").is_valid())
        if "unscored" in self.words:
            found.append(pc.field("reward").is_null())
        return reduce(and_, found) if found else None


def _allowed(name: str) -> str:
    return ", ".join(_COMPARISONS) if name in _NUMBERS else "=, != or ~"


class _File(NamedTuple):
    """A file of samples."""

    find: Callable[[], Path]
    """Called when it is read, as it is checked then."""
    step: int | None
    is_dropped: bool


def find_samples(reader: RunReader, asked: SampleFilter, *, num: int, worst: bool) -> tuple[list[FoundSample], bool]:
    """Return the newest samples of a run that are asked for, and whether there are more.

    ``worst`` are those of the lowest rewards rather than the newest; samples without one are left out.

    Raises:
        RunDirectoryError: If files are missing or damaged.
    """
    files = [
        _File(partial(reader.file, folder, record.step), record.step, folder == DROPPED)
        for record in reversed(reader.steps(asked.has_step))
        for folder in asked.folders()
        if folder == BATCHES or record.num_dropped
    ]
    return _find(files, asked, num=num, worst=worst)


def find_answers(path: Path, asked: SampleFilter, *, num: int, worst: bool) -> tuple[list[FoundSample], bool]:
    """Return answers of an evaluation as :func:`find_samples`, of its file of answers, in their order.

    Raises:
        ConfigError: If the filter asks for what only runs have.
        RunDirectoryError: If the file is missing or damaged.
    """
    only_of_runs = {"step", "drop_reason", "outcome", "detail", "kept", "dropped"}
    if unknown := only_of_runs & {*asked.columns, *asked.words}:
        raise ConfigError(f"--filter: an evaluation has no {', '.join(sorted(unknown))}, only runs have")
    return _find([_File(lambda: path, None, False)], asked, num=num, worst=worst)


def advantages_of(reader: RunReader, found: FoundGroup) -> dict[int, float | list[float]]:
    """Return the advantages of a group's samples by their index, a number or one a token; none where it was dropped.

    Raises:
        RunDirectoryError: If files are missing or damaged.
    """
    if found.drop_reason is not None:
        return {}
    path, condition = reader.file(BATCHES, found.step), pc.field("group_index") == found.group.group_index
    return {row["index"]: row["advantage"] for row in read_columns(path, ("index", "advantage"), condition)}


def _find(files: Sequence[_File], asked: SampleFilter, *, num: int, worst: bool) -> tuple[list[FoundSample], bool]:
    found: list[tuple[float, int, _Row]] = []
    for number, file in enumerate(files):
        if not worst and len(found) > num:
            break
        if worst and len(found) > num and least_value(file.find(), "reward") >= found[-1][0]:
            continue
        rows = [row for row in _rows(file, (*_KEYS, "reward"), asked) if not worst or row["reward"] is not None]
        entries = [(row["reward"] if worst else 0.0, number, row) for row in rows]
        # Stable: of equal ones the first that were read stay first.
        found = heapq.nsmallest(num + 1, [*found, *entries], key=itemgetter(0))
    described: dict[tuple[Any, ...], FoundSample] = {}
    for number, chosen in groupby(sorted(found[:num], key=itemgetter(1)), key=itemgetter(1)):
        wanted = {_key(row) for _, _, row in chosen}
        described |= {(number, *key): sample for key, sample in _described(files[number], wanted)}
    return [described[number, *_key(row)] for _, number, row in found[:num]], len(found) > num


def _rows(
    file: _File, columns: Sequence[str], asked: SampleFilter | None = None, groups: Sequence[int] = ()
) -> list[_Row]:
    """Return rows by the names that columns have in runs."""
    of_run = file.step is not None
    names = {name: name if of_run else _OF_EVALUATION.get(name, name) for name in columns}
    condition = None if asked is None else asked.expression(of_evaluation=not of_run)
    if groups:
        condition = pc.field(names["group_index"]).isin(groups)
    rows = read_columns(file.find(), list(dict.fromkeys(names.values())), condition, is_versioned=of_run)
    return [{name: row[column] for name, column in names.items()} for row in rows]


def _key(row: _Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEYS)


def _described(file: _File, wanted: set[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], FoundSample]]:
    """Yield samples of a file by their keys; texts are read of their groups only."""
    of_run = file.step is not None
    columns = (*_KEYS, *_SHOWN, *(("detail",) if of_run else ()), *(("drop_reason",) if file.is_dropped else ()))
    rows = _rows(file, columns, groups=sorted({group for _, group, _, _ in wanted}))
    for _, group in groupby(rows, key=lambda row: (row["source"], row["group_index"])):
        members = dict[Any, int]()
        for row in group:
            member = members.setdefault(row["rollout_id"], len(members))
            if _key(row) in wanted:
                yield _key(row), _sample(row, file.step, member if of_run else row["rollout_id"])


def _sample(row: _Row, step: int | None, member: int) -> FoundSample:
    correct = row["correct"]
    if isinstance(correct, bool):  # of an evaluation
        correct = "yes" if correct else "no"
    same = ("group_index", "index", "source", "prompt_id", "reward", "extracted", "error")
    return FoundSample(
        **{name: row[name] for name in same},
        step=step,
        member=member,
        question=question_of(row["prompt"], json.loads(row["messages"] or "[]")),
        response=row["response"] or "",
        correct=None if correct is None else Correct(correct),
        status=SampleStatus(row["status"]),
        response_length=row["response_length"] or 0,
        label=json.loads(row["label"] or "null"),
        detail=row.get("detail"),
        drop_reason=row.get("drop_reason"),
    )
