"""Which problems of an environment are held out of training: by what they ask, not by the seed that made them.

Invariant: the side of a problem depends on its question, the environment and the level, and on no run, split, index or
process.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollfeed.environments.tasks import make_task
from rollfeed.environments.variants import HasSplits
from rollfeed.protocols import Environment
from rollfeed.seeds import derive_seed

TRAIN = "train"
"""The split that training draws from; problems of every other split are held out of it."""
HELD_OUT_SHARE = 0.2
"""Of all problems of a level."""

_CENSUS_SIZE = 200
"""Problems that are looked at before a level counts as having none on one side: of a large level 1 in 10^19 does."""


@dataclass(frozen=True, slots=True)
class HeldOutRule:
    """Problems whose hash is below a threshold are held out."""

    threshold: int

    def is_of(self, question: str, split: str) -> bool:
        """Whether a problem is of a split."""
        return (problem_hash(question) < self.threshold) is (split != TRAIN)


def problem_hash(question: str) -> int:
    """Return 64 bits that depend on what a problem asks."""
    return derive_seed("problem", question)


def held_out_rule(environment: Environment, level: int) -> HeldOutRule | None:
    """Return what is held out of training at a level; None where the environment has splits of its own.

    A fifth of all problems is. Where all of a level's problems would be on one side, as may be of the few of a small
    level, one alone is on the other: the one with the lowest hash is held out, or the one with the highest is trained
    on. The only problem of a level is trained on, and none is held out.
    """
    if isinstance(environment, HasSplits):
        return None
    share = HeldOutRule(int(HELD_OUT_SHARE * 2**64))
    hashes: set[int] = set()
    for index in range(_CENSUS_SIZE):
        try:
            task = make_task(environment, level=level, index=index, run_seed=0, split="census")
        except Exception:  # of another package perhaps; the source that meets it tells
            continue
        hashes.add(problem_hash(task.question))
        if min(hashes) < share.threshold <= max(hashes):
            return share
    if not hashes:
        return share
    if len(hashes) == 1:
        return HeldOutRule(0)
    return HeldOutRule(min(hashes) + 1 if min(hashes) >= share.threshold else max(hashes))
