"""The built-in graders by ``rm_type``, and how each is to be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from rollfeed.answers import final_text, find_box
from rollfeed.config.reward import is_judge
from rollfeed.protocols import AnswerMarker, Grader
from rollfeed.rewards.calls import OwnPace
from rollfeed.rewards.graders import gpqa, ifeval, mathematics, texts
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import NO_LABEL, LabelError, label_texts
from rollfeed.seeds import derive_seed
from rollfeed.types import Verdict

BOXED_PREFIX = "boxed_"
CODE_RM_TYPE = "livecodebench"
REMOTE_RM_TYPE = "remote_rm"
SEED_KEY = "sample_seed"
"""Entry of the metadata with an integer that stands for the run's seed and the sample; the hub sets it."""
_OTHER_NAMES = MappingProxyType({"ifbench": "ifeval"})
"""What else graders are called, by users of slime."""

_BOXES_ONLY, _NO_MARKS = ("math", "deepscaler"), ("dapo", "f1")

Compare: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Verdict | IsolatedCall]
"""Compares a response with what was read of label and metadata, and is given the metadata."""
Read: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]
"""Returns what responses are compared with, or raises LabelError."""


@dataclass(frozen=True, slots=True)
class BuiltinGrader:
    """A grader of this package: pure, and done in microseconds or else asking for an isolated call.

    Called as a plain grader it does everything in the calling thread.
    """

    rm_type: str
    compare: Compare
    read: Read = lambda label, metadata: label
    read_of_row: Read | None = None
    """As ``read``, but refuses also what can only be a mistake in a data set."""
    boxed: Compare | None = None
    """Of ``boxed_<rm_type>``; by default ``compare`` with the content of the last box."""
    keys: tuple[str, ...] = ()
    """What ``reward_key`` may choose; empty for a grader that gives one number."""

    def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        begun = self.grade(response, label, metadata)
        return begun if isinstance(begun, Verdict) else begun.run_here()

    def grade(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
        """Return the verdict, an ERROR where nothing can be compared; or the call that it takes."""
        try:
            return self.compare(response, self.read(label, metadata), metadata)
        except LabelError as error:
            return Verdict.failed(f"rm_type {self.rm_type}: {error}")

    def problem(self, label: Any, metadata: Mapping[str, Any]) -> str | None:
        """Fits :data:`rollfeed.rewards.labels.LabelProblem`."""
        try:
            (self.read_of_row or self.read)(label, metadata)
        except LabelError as error:
            return NO_LABEL if error.is_missing else str(error)
        return None


def grader_name(rm_type: str) -> str:
    """Return the grader that an ``rm_type`` stands for, by its own name and without ``boxed_``."""
    inner = rm_type.removeprefix(BOXED_PREFIX)
    return _OTHER_NAMES.get(inner, inner)


def asks_server(rm_type: str) -> bool:
    """Whether a grader asks a server or a judge, which may say something else next time."""
    name = grader_name(rm_type)
    return name == REMOTE_RM_TYPE or is_judge(name)


def reads(rm_type: str, marker: AnswerMarker) -> bool:
    """Whether a grader finds answers in these marks, where it looks for marked answers at all."""
    if rm_type.startswith(BOXED_PREFIX) or rm_type in _BOXES_ONLY:
        return marker is AnswerMarker.BOXED
    return rm_type not in _NO_MARKS


def boxed(grader: Grader | OwnPace) -> Grader | OwnPace:
    """Return the grader for ``boxed_<rm_type>``: of a response it sees the content of the last box, or nothing."""
    inner = grader.compare if isinstance(grader, BuiltinGrader) else grader

    def of_box(response: str, label: Any, metadata: Mapping[str, Any]) -> Any:
        return inner(find_box(final_text(response)) or "", label, metadata)

    if isinstance(grader, BuiltinGrader):
        return replace(grader, rm_type=BOXED_PREFIX + grader.rm_type, compare=grader.boxed or of_box)
    return OwnPace(of_box) if isinstance(grader, OwnPace) else of_box


def _compare_with_chance(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Give 0 or 1 with equal chance, the same whenever the sample's seed is the same; else by the response."""
    seed = metadata.get(SEED_KEY)
    part = seed if isinstance(seed, int) else response.encode("utf-8", "replace").decode()
    return Verdict(reward=float(derive_seed("random reward", part) & 1))


def _of_texts(rm_type: str, compare: Compare, keys: tuple[str, ...] = ()) -> BuiltinGrader:
    return BuiltinGrader(rm_type, compare, read=label_texts, keys=keys)


def _of_formulas(rm_type: str, compare: Compare, boxed: Compare, keys: tuple[str, ...] = ()) -> BuiltinGrader:
    read, of_row = mathematics.label_formulas, mathematics.possible_formulas
    return BuiltinGrader(rm_type, compare, read=read, read_of_row=of_row, boxed=boxed, keys=keys)


def _of_instructions(rm_type: str, compare: Compare) -> BuiltinGrader:
    return BuiltinGrader(rm_type, compare, read=ifeval.instructions_of, read_of_row=ifeval.known_instructions_of)


_GRADERS = (
    _of_texts("bbeh", texts.compare_leniently, keys=texts.BBEH_KEYS),
    _of_formulas("dapo", mathematics.compare_dapo, mathematics.compare_boxed_dapo, keys=("acc", "score")),
    _of_formulas("deepscaler", mathematics.compare_deepscaler, mathematics.compare_deepscaler),
    _of_texts("exact", texts.compare_exactly),
    _of_texts("f1", texts.compare_words),
    BuiltinGrader("gpqa", gpqa.compare_choice, read=gpqa.right_choice, read_of_row=gpqa.known_choice),
    _of_instructions("ifeval", ifeval.compare_strictly),
    _of_instructions("ifeval_loose", ifeval.compare_loosely),
    _of_formulas("math", mathematics.compare_box, mathematics.compare_box),
    _of_formulas("math_verify", mathematics.compare_answer, mathematics.compare_box),
    BuiltinGrader("number", texts.compare_number, read=texts.label_numbers),
    BuiltinGrader("random", _compare_with_chance),
)
BUILTIN_GRADERS: Mapping[str, BuiltinGrader] = MappingProxyType({grader.rm_type: grader for grader in _GRADERS})
"""By ``rm_type``; the application adds those of environments, code and servers."""
