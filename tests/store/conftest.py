from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from rollfeed.testing import sample_of
from rollfeed.types import (
    Correct,
    Dropped,
    Group,
    LedgerCounts,
    Outcome,
    Picture,
    PictureKind,
    Prompt,
    Reward,
    Rollout,
    RunState,
    Sample,
    SampleStatus,
    SamplingMask,
    StepCommit,
    TrainBatch,
    Verdict,
    VersionSpan,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
REWARD = FLOAT | st.dictionaries(TEXT, FLOAT, min_size=1, max_size=3)


def array(values: Sequence[float], kind: type) -> Any:
    return np.array(values, dtype=kind)


def pictures() -> st.SearchStrategy[Picture]:
    return st.builds(
        Picture,
        content_hash=TEXT,
        media_type=TEXT,
        width=st.integers(1, 2**31 - 1),
        height=st.integers(1, 2**31 - 1),
        kind=st.sampled_from(PictureKind),
        source=TEXT,
    )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    return Prompt(
        prompt_id=draw(TEXT),
        source=draw(TEXT),
        text=draw(TEXT),
        token_ids=array(draw(st.lists(INT32, max_size=4)), np.int32),
        messages=draw(st.none() | st.lists(OBJECT, max_size=2).map(tuple)),
        label=draw(JSON),
        metadata=draw(OBJECT),
        tools=draw(st.none() | st.lists(OBJECT, max_size=2).map(tuple)),
        images=draw(st.lists(pictures(), max_size=2).map(tuple)),
    )


def spans(lengths: Sequence[int], versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    ends = np.cumsum(lengths).tolist()
    return tuple(
        VersionSpan(end - length, end, version)
        for length, end, version in zip(lengths, ends, versions, strict=True)
        if length
    )


@st.composite
def samples(draw: st.DrawFn, group_index: int, index: int, rollout_id: int, reward: Reward | None) -> Sample:
    old, new = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    length = old + new
    return Sample(
        token_ids=array(draw(st.lists(INT32, min_size=length, max_size=length + 4)), np.int32),
        response_length=length,
        loss_mask=array(draw(st.lists(FLOAT32, min_size=length, max_size=length)), np.float32),
        logprobs=array(draw(st.lists(FLOAT32, min_size=length, max_size=length)), np.float32),
        version_spans=spans([old, new], [draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))]),
        status=draw(st.sampled_from(SampleStatus)),
        group_index=group_index,
        index=index,
        rollout_id=rollout_id,
        response=draw(TEXT),
        label=draw(JSON),
        reward=reward,
        metadata=draw(OBJECT),
        images=draw(st.lists(pictures(), max_size=2).map(tuple)),
        non_generation_seconds=draw(FLOAT),
        cached_tokens=draw(st.integers(0, 2**31 - 1)),
        precision=draw(st.sampled_from(["", "fp32", "bf16+int8"])),
        remove_sample=draw(st.booleans()),
        extra=draw(OBJECT),
    )


@st.composite
def verdicts(draw: st.DrawFn, reward: Reward | None) -> Verdict | None:
    outcome = Outcome.OK if reward is not None else draw(st.sampled_from([None, Outcome.ERROR, Outcome.TIMEOUT]))
    if outcome is None:
        return None
    return Verdict(
        reward=reward,
        correct=draw(st.sampled_from(Correct)),
        format_ok=draw(st.booleans()),
        extracted=draw(st.none() | TEXT),
        outcome=outcome,
        detail=draw(TEXT),
    )


@st.composite
def groups(draw: st.DrawFn, group_index: int = 0, at_least: int = 0) -> Group:
    """Groups of every shape: forks, and unless at_least is 1, rollouts without samples and no rollouts at all."""
    rollouts = []
    for number in range(draw(st.integers(at_least, 3))):
        num_samples = draw(st.integers(at_least, 2))
        reward = draw(st.none() | REWARD) if num_samples else None
        rollout_id = group_index * 10 + number
        verdict = draw(verdicts(reward))
        members = [
            replace(
                draw(samples(group_index, rollout_id * 10 + fork, rollout_id, reward)),
                correct=verdict.correct if verdict is not None else Correct.UNDEFINED,
            )
            for fork in range(num_samples)
        ]
        rollouts.append(
            Rollout(
                rollout_id=rollout_id,
                samples=tuple(members),
                verdict=verdict,
                error=draw(st.none() | TEXT),
                seconds=draw(FLOAT),
            )
        )
    return Group(group_index=group_index, prompt=draw(prompts()), rollouts=tuple(rollouts))


@st.composite
def draws(draw: st.DrawFn, group_index: int = 0) -> Group:
    """Fresh draws, and draws with what an earlier execution left: finished, aborted and failed rollouts."""
    group = draw(groups(group_index))
    return Group(group_index, group.prompt, draw(st.sampled_from([(), group.rollouts])))


@st.composite
def states(draw: st.DrawFn) -> RunState:
    counts = {field.name: draw(st.integers(0, 2**40)) for field in fields(LedgerCounts)}
    return RunState(
        next_step=draw(st.integers(1, 10**6)),
        next_group_index=draw(st.integers(0, 10**9)),
        source=draw(OBJECT),
        requeued=tuple(draw(draws(index)) for index in range(draw(st.integers(0, 2)))),
        surplus=tuple(draw(groups(index)) for index in range(draw(st.integers(0, 2)))),
        in_flight=tuple(draw(draws(index)) for index in range(draw(st.integers(0, 2)))),
        lengths=draw(OBJECT),
        ledger=LedgerCounts(**counts),
        outcomes=tuple(draw(st.lists(st.booleans(), max_size=20))),
    )


@pytest.fixture(scope="session")
def any_group() -> Callable[..., st.SearchStrategy[Group]]:
    return groups


@pytest.fixture(scope="session")
def any_state() -> st.SearchStrategy[RunState]:
    return states()


@pytest.fixture(scope="session")
def any_draw() -> st.SearchStrategy[Group]:
    return draws()


def plain_value(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.tolist())
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


@pytest.fixture(scope="session")
def plain() -> Callable[[Any], Any]:
    """Records as values that compare with ==, array types included."""
    return plain_value


def build_group(group_index: int, rewards: Sequence[float], *, response: str = "four", seconds: float = 0.5) -> Group:
    prompt = Prompt(
        prompt_id=f"words/{group_index}",
        source="words",
        text=f"<user>What is {group_index} + 1?<assistant>",
        token_ids=np.arange(3, dtype=np.int32),
        messages=({"role": "user", "content": f"What is {group_index} + 1?"},),
        label=str(group_index + 1),
    )
    rollouts = []
    for number, reward in enumerate(rewards):
        index = group_index * len(rewards) + number
        sample = sample_of(
            range(3),
            range(3, 5 + number),
            logprobs=np.linspace(-1, -0.5, 2 + number, dtype=np.float32),
            version_spans=(VersionSpan(0, 2 + number, 7),),
            group_index=group_index,
            index=index,
            rollout_id=index,
            response=f"{response} {number}",
            label=prompt.label,
            non_generation_seconds=seconds / 2,
            cached_tokens=3,
            precision="fp32",
        )
        correct = Correct.YES if reward > 0 else Correct.NO
        rollout = Rollout(rollout_id=index, samples=(sample,), seconds=seconds)
        rollouts.append(rollout.with_reward(Verdict(reward=reward, correct=correct, extracted=str(number))))
    return Group(group_index=group_index, prompt=prompt, rollouts=tuple(rollouts))


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    return build_group


@pytest.fixture
def with_masks() -> Callable[[Group], Group]:
    """Return a group of which every sample's tokens were drawn from its first tokens' ids."""

    def masked(sample: Sample) -> Sample:
        rows = [sample.token_ids[: number + 1] for number in range(sample.response_length)]
        return replace(sample, sampling_mask=SamplingMask.of(rows))

    def change(group: Group) -> Group:
        rollouts = [replace(each, samples=tuple(map(masked, each.samples))) for each in group.rollouts]
        return replace(group, rollouts=tuple(rollouts))

    return change


@pytest.fixture
def with_own_rewards() -> Group:
    """Its first rollout has two samples with rewards of their own, its second two that share one."""
    group = build_group(4, [0.2, 0.5])
    first, second = (
        replace(rollout, verdict=None, samples=(replace(sample, index=100 + sample.index), sample))
        for rollout in group.rollouts
        for sample in [replace(rollout.samples[0], reward=None)]
    )
    first = replace(first, samples=(replace(first.samples[0], reward=0.2), first.samples[1]))
    judged = Verdict(reward=0.9, correct=Correct.YES, extracted="4")
    rollouts = (first.with_verdicts([Verdict(reward=0.2), judged]), second.with_verdicts([judged]))
    return replace(group, rollouts=rollouts)


def build_commit(step: int, *, num_dropped: int = 1, seconds: float = 0.5) -> StepCommit:
    """A step of two kept groups and ``num_dropped`` dropped ones, and the state that goes with it."""
    first = (step - 1) * (2 + num_dropped)
    kept = tuple(build_group(first + i, [1.0, 0.0], seconds=seconds) for i in range(2))
    dropped = tuple(
        Dropped(group=build_group(first + 2 + i, [0.0, 0.0], seconds=seconds), reason="zero_std_0.0")
        for i in range(num_dropped)
    )
    wasted = {"dropped": sum(drop.group.response_tokens for drop in dropped)} if dropped else {}
    return StepCommit(
        batch=TrainBatch(
            step=step,
            policy_version=7,
            groups=kept,
            advantages_S=np.array([0.5, -0.5, 0.5, -0.5], np.float32),
            metrics={"rollout/reward_mean": 0.5, "perf/tokens_per_second": 10.0 / seconds},
        ),
        dropped=dropped,
        wasted_tokens=wasted,
        state=RunState(
            next_step=step + 1,
            next_group_index=first + 2 + num_dropped,
            source={"cursor": step},
            ledger=LedgerCounts(drawn=step * (2 + num_dropped), trained=2 * step, dropped=num_dropped * step),
        ),
    )


@pytest.fixture(scope="session")
def make_commit() -> Callable[..., StepCommit]:
    return build_commit
