"""Groups as a run would have them, without tokens that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rollfeed.testing import make_group
from rollfeed.types import Correct, Group, Verdict, VersionSpan


@pytest.fixture
def answered() -> Callable[..., Group]:
    """Return a factory of scored groups: a prompt of an environment's level, and whether each rollout is right."""

    def make(
        right: Sequence[bool | None], *, environment: str = "my/a", level: int = 0, version: int = 1, policy: int = 0
    ) -> Group:
        group = make_group([float(bool(each)) for each in right])
        correct = {True: Correct.YES, False: Correct.NO, None: Correct.UNDEFINED}
        verdicts = [Verdict(reward=float(bool(each)), correct=correct[each]) for each in right]
        span = VersionSpan(0, 1, policy)
        metadata = {"environment": environment, "level": level, "version": version}
        return replace(
            group,
            prompt=replace(group.prompt, metadata=metadata),
            rollouts=tuple(
                replace(rollout, samples=(replace(rollout.samples[0], version_spans=(span,)),)).with_reward(verdict)
                for rollout, verdict in zip(group.rollouts, verdicts, strict=True)
            ),
        )

    return make
