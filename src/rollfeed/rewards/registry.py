"""The built-in graders by ``rm_type``, and how each is to be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from rollfeed.answers import final_text, find_box
from rollfeed.protocols import Grader
from rollfeed.rewards.calls import OwnPace
from rollfeed.rewards.graders.bbeh import grade_bbeh
from rollfeed.rewards.graders.dapo import grade_boxed_dapo, grade_dapo
from rollfeed.rewards.graders.deepscaler import grade_deepscaler
from rollfeed.rewards.graders.exact import grade_exact
from rollfeed.rewards.graders.f1 import grade_f1
from rollfeed.rewards.graders.gpqa import gpqa_problem, grade_gpqa
from rollfeed.rewards.graders.ifeval import grade_ifeval, grade_ifeval_loose, ifeval_problem
from rollfeed.rewards.graders.math import grade_math
from rollfeed.rewards.graders.math_verify import grade_math_verify
from rollfeed.rewards.graders.number import grade_number, number_problem
from rollfeed.rewards.graders.random_bit import grade_random
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import LabelProblem, text_problem
from rollfeed.rewards.mathematics import math_problem
from rollfeed.types import Verdict

BOXED_PREFIX = "boxed_"
CODE_RM_TYPE = "livecodebench"
REMOTE_RM_TYPE = "remote_rm"
_OTHER_NAMES = MappingProxyType({"ifbench": "ifeval"})
"""What else graders are called, by users of slime."""

Grade: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Verdict | IsolatedCall]


def no_problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Fits :data:`rollfeed.rewards.labels.LabelProblem`, for graders that look at neither."""
    return None


@dataclass(frozen=True, slots=True)
class BuiltinGrader:
    """A grader of this package: pure, and done in microseconds or else asking for an isolated call.

    Called as a plain grader it does everything in the calling thread.
    """

    grade: Grade
    boxed: Grade | None = None
    """Grader for ``boxed_<rm_type>``; by default ``grade`` on the content of the last box."""
    problem: LabelProblem = no_problem
    """Why a label and metadata can be used for no response."""
    keys: tuple[str, ...] = ()
    """What ``reward_key`` may choose; empty for a grader that gives one number."""

    def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        begun = self.grade(response, label, metadata)
        return begun if isinstance(begun, Verdict) else begun.run_here()


def grader_name(rm_type: str) -> str:
    """Return the grader that an ``rm_type`` stands for, by its own name and without ``boxed_``."""
    inner = rm_type.removeprefix(BOXED_PREFIX)
    return _OTHER_NAMES.get(inner, inner)


def boxed(grader: Grader | OwnPace) -> Grader | OwnPace:
    """Return the grader for ``boxed_<rm_type>``: of a response it sees the content of the last box, or nothing."""
    if isinstance(grader, BuiltinGrader):
        grade = grader.grade
        of_box = grader.boxed or (lambda response, label, metadata: grade(_box(response), label, metadata))
        return BuiltinGrader(of_box, problem=grader.problem, keys=grader.keys)
    if isinstance(grader, OwnPace):
        return OwnPace(lambda response, label, metadata: grader(_box(response), label, metadata))
    return lambda response, label, metadata: grader(_box(response), label, metadata)


def _box(response: str) -> str:
    return find_box(final_text(response)) or ""


BUILTIN_GRADERS: Mapping[str, BuiltinGrader] = MappingProxyType(
    {
        "bbeh": BuiltinGrader(grade_bbeh, problem=text_problem),
        "dapo": BuiltinGrader(grade_dapo, boxed=grade_boxed_dapo, problem=math_problem, keys=("acc", "score")),
        "deepscaler": BuiltinGrader(grade_deepscaler, boxed=grade_deepscaler, problem=math_problem),
        "exact": BuiltinGrader(grade_exact, problem=text_problem),
        "f1": BuiltinGrader(grade_f1, problem=text_problem),
        "gpqa": BuiltinGrader(grade_gpqa, problem=gpqa_problem),
        "ifeval": BuiltinGrader(grade_ifeval, problem=ifeval_problem),
        "ifeval_loose": BuiltinGrader(grade_ifeval_loose, problem=ifeval_problem),
        "math": BuiltinGrader(grade_math, boxed=grade_math, problem=math_problem),
        "math_verify": BuiltinGrader(grade_math_verify, boxed=grade_math, problem=math_problem),
        "number": BuiltinGrader(grade_number, problem=number_problem),
        "random": BuiltinGrader(grade_random),
    }
)
"""``rm_type`` of every grader of this package; the application adds those of environments, code and servers."""
