"""Answers one prompt n times and scores the answers.

Invariants: a group leaves the runner whole or not at all; an exception in one rollout fails that
rollout only; a rollout is scored while others are generated, unless its reward depends on them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np

from rollfeed.base.waiting import Deadlines
from rollfeed.completions import check_sample, freeze, share_mask
from rollfeed.config import GroupFailurePolicy, RolloutMode, RolloutSettings
from rollfeed.errors import EngineProtocolError, PictureMismatchError
from rollfeed.faults import blaming, complaint, describe
from rollfeed.pipeline.groups.failures import FailureBudget
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.step_clock import Activity, StepClock
from rollfeed.pipeline.groups.teaching import ask_teacher
from rollfeed.protocols import (
    GenerateFn,
    RolloutObserver,
    RolloutRequest,
    RunningGroup,
    SampleHook,
    Scorer,
    Services,
    Teacher,
    TurnJournal,
)
from rollfeed.routing import belonging
from rollfeed.seeds import rollout_seed
from rollfeed.types import (
    Group,
    Outcome,
    Prompt,
    Replied,
    Rollout,
    Sample,
    Sampled,
    SampleStatus,
    SamplingParams,
    Verdict,
)

_GENERATE = "plugins.generate"
_SAMPLE_HOOK = "plugins.sample_hook"
_UNENDED = (SampleStatus.PENDING, SampleStatus.FAILED)
START_ROLLOUT_ID = "start_rollout_id"
"""In the metadata of a sample whose response was cut short: the step that did so first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The settings and functions that all groups of a run share."""

    settings: RolloutSettings
    seed: int
    """Of the run or set; the seeds of the rollouts derive from it."""
    params: SamplingParams
    """Without a seed; each rollout gets its own."""
    max_context_length: int
    generate_fn: GenerateFn
    services: Services
    """What it may use."""
    scorer: Scorer
    sample_hook: SampleHook | None = None
    teacher: Teacher | None = None
    """Says how likely it finds what was sampled, before that is scored."""
    evaluation: bool = False
    """Whether answers measure the policy and are not trained on."""


class _Members:
    """The members of a group that are generated or scored now."""

    def __init__(self, running: RunningGroup, on_generated: Callable[[], None] | None, *, scores_aborted: bool) -> None:
        self._running = running
        self._on_generated = on_generated
        self._scores_aborted = scores_aborted
        self._scoring: set[asyncio.Task[Any]] = set()
        self.was_aborted = False
        self.generating = {member for member, rollout in enumerate(running.rollouts) if not rollout.has_finished}
        self._tell_if_generated()

    def generated(self, member: int, rollout: Rollout) -> None:
        """Take note of a member that is no longer generated."""
        self.generating.discard(member)
        self._tell_if_generated()
        if rollout.status is SampleStatus.ABORTED:
            self.was_aborted = True
            for task in () if self._scores_aborted else self._scoring:
                task.cancel()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Let the block be cancelled by an abort."""
        self._scoring.add(task := cast(asyncio.Task[Any], asyncio.current_task()))
        yield
        self._scoring.discard(task)

    def _tell_if_generated(self) -> None:
        if not self.generating:
            self._running.phase = "scoring"
            if self._on_generated is not None:
                self._on_generated()


class GroupRunner:
    """Runs groups; any number of them at once."""

    def __init__(
        self,
        plan: GroupPlan,
        *,
        gate: EngineGate,
        failures: FailureBudget,
        observer: RolloutObserver,
        clock: StepClock | None = None,
    ) -> None:
        self._plan = plan
        self._gate = gate
        self._settings = settings = plan.settings
        self._failures = failures
        self._observer = observer
        self._clock = clock or StepClock()
        self._deadlines = Deadlines()
        self._retries = settings.failure_retries if settings.group_failure is GroupFailurePolicy.RETRY else 0
        self._reward_failures: Counter[Outcome] = Counter()
        self.num_generated_tokens = 0
        """Response tokens of all rollouts that have ended, used or not."""

    @property
    def n_samples_per_prompt(self) -> int:
        """Rollouts of a group."""
        return self._settings.n_samples_per_prompt

    @property
    def journal(self) -> TurnJournal:
        """The journal of rollouts of several turns."""
        return self._plan.services.journal

    async def run(self, running: RunningGroup, *, step: int, on_generated: Callable[[], None] | None = None) -> Group:
        """Finish the members of a group that have not finished, score those that are not scored, and return the group.

        ``running`` is filled as members are generated and scored. ``on_generated`` is called once when nothing is left
        to be generated, unless that raises before.

        Raises:
            RunFailedError: If the failure budget is spent.
        """
        rollouts = running.rollouts
        if self._settings.mask_offpolicy_finished_members:
            version = self._plan.services.endpoint.policy_version
            rollouts[:] = [each.without_versions_before(version) if each.has_finished else each for each in rollouts]
        uncounted = sum(rollout.is_scored for rollout in rollouts)
        members = _Members(running, on_generated, scores_aborted=self._settings.mode is not RolloutMode.SYNC)

        async def finish(member: int) -> None:
            if member in members.generating:
                members.generated(member, await self._rollout(running, member, step))
            rollout = rollouts[member]
            if rollout.has_finished and not members.was_aborted and self._scores_alone(rollout, running.group.prompt):
                with members.scoring():
                    await self._score(running, [member])

        try:
            async with asyncio.TaskGroup() as tasks:
                for member, rollout in enumerate(rollouts):
                    if not rollout.is_scored:
                        tasks.create_task(finish(member), name=f"group {running.group.group_index}.{member}")
        except* Exception as errors:
            raise errors.exceptions[0] from None
        unscored = [rollout for rollout in rollouts if rollout.has_finished and not rollout.is_scored]
        if unscored and all(rollout.has_finished for rollout in rollouts):
            await self._score(running, range(len(rollouts)))
        elif any(rollout.error is not None for rollout in rollouts):
            uncounted += len(unscored)
        group = replace(running.group, rollouts=tuple(rollouts))
        if group.is_finished or group.error is not None:
            for _ in range(uncounted):
                self._failures.succeed(group.group_index)
        return group

    async def _rollout(self, running: RunningGroup, member: int, step: int) -> Rollout:
        """Answer once, or resume what there is, and put the outcome into the group."""
        group, before = running.group, running.rollouts[member]
        request = self._request(group, before, member, step)
        started = time.monotonic()
        for _ in range(1 + self._retries):
            try:
                version = self._plan.services.endpoint.policy_version
                async with self._deadlines.within(self._settings.rollout_timeout_seconds):
                    with blaming(_GENERATE, self._plan.generate_fn), self._belonging(request):
                        made = await self._plan.generate_fn(request, services=self._plan.services)
                    samples = await self._checked(made, request, version)
                seconds = before.seconds + time.monotonic() - started
                rollout = Rollout(rollout_id=request.rollout_id, samples=samples, seconds=seconds)
                break
            except PictureMismatchError:
                raise
            except Exception as error:
                # Failure isolation: whatever a generate function or hook raises fails its rollout only.
                cause = self._describe(error)
                self._failures.fail(group.group_index, cause, where=_where(group))
                rollout = _failed(request, f"{_where(group)}: {cause}")
        running.rollouts[member] = rollout
        self.num_generated_tokens += max(0, rollout.response_tokens - before.response_tokens)
        self._observer.rollout_finished(rollout)
        return rollout

    def _belonging(self, request: RolloutRequest) -> AbstractContextManager[None]:
        # Sets of an evaluation count their groups anew, and have seeds of their own.
        seed = self._plan.seed
        return belonging(group=f"{seed}-group{request.group_index}", session=f"{seed}-rollout{request.rollout_id}")

    def _request(self, group: Group, before: Rollout, member: int, step: int) -> RolloutRequest:
        plan, partial = self._plan, _partial(before)
        group.prompt.token_ids.setflags(write=False)
        if partial is not None:
            freeze(partial)
        index = group.group_index * self.n_samples_per_prompt + member
        seed = rollout_seed(plan.seed, step=step, group_index=group.group_index, member=member)
        return RolloutRequest(
            prompt=group.prompt,
            params=replace(plan.params, seed=seed),
            group_index=group.group_index,
            index=index,
            rollout_id=index,
            step=step,
            max_context_length=plan.max_context_length,
            partial=partial,
            state=before.samples[-1].state if before.samples else {},
            evaluation=plan.evaluation,
        )

    async def _checked(self, samples: object, request: RolloutRequest, version: int) -> tuple[Sample, ...]:
        """Return what a generate function has made as it is scored, with ``version`` the engine's when it was asked."""
        if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
            told = f"returned {samples!r:.80}; it must return a list of at least one Sample"
            raise complaint(_GENERATE, self._plan.generate_fn, told)
        samples = [_with_origin(sample, request.partial) for sample in samples]
        for sample in samples:
            self._check(sample, request, setting=_GENERATE, function=self._plan.generate_fn)
        if self._settings.mask_offpolicy_in_partial_rollout:
            samples = [sample.without_versions_before(version) for sample in samples]
        if self._plan.sample_hook is None or any(sample.status is SampleStatus.ABORTED for sample in samples):
            return tuple(map(share_mask, samples))
        with blaming(_SAMPLE_HOOK, self._plan.sample_hook):
            given = [self._plan.sample_hook(sample, request.prompt) for sample in samples]
            hooked = tuple([await each if isinstance(each, Awaitable) else each for each in given])
        for sample in hooked:
            if not isinstance(sample, Sample):
                told = f"returned {sample!r:.80}; return the sample to use"
                raise complaint(_SAMPLE_HOOK, self._plan.sample_hook, told)
            self._check(sample, request, setting=_SAMPLE_HOOK, function=self._plan.sample_hook)
        return tuple(map(share_mask, hooked))

    def _check(self, sample: Sample, request: RolloutRequest, *, setting: str, function: object) -> None:
        if sample.status in (_UNENDED if setting == _GENERATE else (*_UNENDED, SampleStatus.ABORTED)):
            told = f"returned a sample whose status is {sample.status.value}; raise where an answer cannot be made"
            raise complaint(setting, function, told)
        limits, turns = self._gate.limits, self.journal.turns(request)
        earlier = [*(turn.completion.version_spans for turn in turns if isinstance(turn, Sampled | Replied))]
        if request.partial is not None:
            earlier.append(request.partial.version_spans)
        # What another process has sampled may be of versions that have not been published in this one.
        newest = max([limits.newest_version, *(span.policy_version for spans in earlier for span in spans)])
        if newest != limits.newest_version:
            limits = replace(limits, newest_version=newest)
        try:
            check_sample(freeze(sample), request, limits=limits)
        except EngineProtocolError as error:
            raise complaint(setting, function, f"returned a sample that cannot be used: {error}") from None

    def _scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        return all(self._plan.scorer.scores_alone(part, prompt) for part in rollout.parts())

    async def _score(self, running: RunningGroup, members: Sequence[int]) -> None:
        """Score members, trying those again whose grading failed; what still fails is a failed rollout."""
        group, rollouts = running.group, running.rollouts
        for _ in range(1 + self._retries):
            with self._clock.doing(Activity.SCORE):
                failed = await ask_teacher(self._plan.teacher, rollouts, members)
                before = [rollouts[member] for member in members]
                if failed is None:
                    scored = await self._scored(before, group.prompt)
                else:  # rewards that were given stay
                    scored = [each if each.is_scored else replace(each, verdict=failed) for each in before]
            for member, rollout in zip(members, scored, strict=True):
                rollouts[member] = rollout
            self._count(before, scored, group)
            if all(rollout.is_scored for rollout in scored):
                return
        for member in members:
            rollouts[member] = _failed_if_unscored(rollouts[member], group)

    async def _scored(self, before: Sequence[Rollout], prompt: Prompt) -> list[Rollout]:
        parts = [rollout.parts() for rollout in before]
        verdicts = iter(await self._plan.scorer.score([part for each in parts for part in each], prompt))
        return [
            rollout.with_verdicts(list(islice(verdicts, len(each))))
            for rollout, each in zip(before, parts, strict=True)
        ]

    def _count(self, before: Sequence[Rollout], scored: Sequence[Rollout], group: Group) -> None:
        failed: dict[int, Verdict] = {}
        for old, new in zip(before, scored, strict=True):
            if new.verdict is not None and not new.is_scored:
                self._reward_failures[new.verdict.outcome] += 1
                failed[id(new.verdict)] = new.verdict
            elif not old.is_scored:
                self._failures.succeed(group.group_index)
        # A call that was to score several rollouts is one failure, whatever the size of the group.
        for verdict in failed.values():
            self._failures.fail(group.group_index, _reward_cause(verdict), where=_where(group))

    def take_reward_failures(self) -> dict[str, int]:
        """Return how many gradings failed since the last call, by outcome."""
        counts = {each.value: self._reward_failures[each] for each in (Outcome.TIMEOUT, Outcome.ERROR)}
        self._reward_failures.clear()
        return counts

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"not answered within rollout_timeout_seconds = {self._settings.rollout_timeout_seconds:g}"
        return describe(error)


def _partial(before: Rollout) -> Sample | None:
    """Return what can be resumed: one sample with tokens; what has forked begins again."""
    is_one = len(before.samples) == 1 and before.samples[0].response_length
    return before.samples[0] if is_one else None


def _with_origin(sample: Sample, partial: Sample | None) -> Sample:
    """Return the sample with the step at which its response was first cut short, if it was."""
    if partial is None or START_ROLLOUT_ID not in partial.metadata or START_ROLLOUT_ID in sample.metadata:
        return sample
    return replace(sample, metadata={**sample.metadata, START_ROLLOUT_ID: partial.metadata[START_ROLLOUT_ID]})


def _failed_if_unscored(rollout: Rollout, group: Group) -> Rollout:
    if rollout.is_scored or rollout.verdict is None:
        return rollout
    samples = tuple(replace(sample, status=SampleStatus.FAILED) for sample in rollout.samples)
    return replace(rollout, samples=samples, error=f"{_where(group)}: {_reward_cause(rollout.verdict)}")


def _where(group: Group) -> str:
    return f"prompt {group.prompt.prompt_id}"


def _reward_cause(verdict: Verdict) -> str:
    return f"reward {verdict.outcome.value}: {verdict.detail}"


def _failed(request: RolloutRequest, cause: str) -> Rollout:
    nothing = np.empty(0, np.float32)
    sample = Sample(
        token_ids=request.prompt.token_ids,
        response_length=0,
        loss_mask=nothing,
        logprobs=nothing,
        version_spans=(),
        status=SampleStatus.FAILED,
        group_index=request.group_index,
        index=request.index,
        rollout_id=request.rollout_id,
        label=request.prompt.label,
        metadata=request.prompt.metadata,
        images=request.prompt.images,
    )
    return Rollout(rollout_id=request.rollout_id, samples=(sample,), error=cause)
