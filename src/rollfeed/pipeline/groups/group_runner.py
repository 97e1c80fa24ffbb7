"""Answers one prompt n times and scores the answers.

Invariants: a group leaves the runner whole or not at all; an exception in one rollout fails that
rollout only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollfeed.config import GroupFailurePolicy
from rollfeed.errors import RunFailedError
from rollfeed.faults import blaming, complaint, describe
from rollfeed.pipeline.groups.failures import FailureBudget
from rollfeed.pipeline.groups.in_flight import Draft
from rollfeed.protocols import (
    Endpoint,
    GenerateFn,
    RolloutObserver,
    RolloutRequest,
    SampleHook,
    Scorer,
    Tokenizer,
)
from rollfeed.seeds import derive_seed
from rollfeed.types import (
    Group,
    GroupResult,
    GroupStatus,
    Outcome,
    PromptDraw,
    Rollout,
    Sample,
    SampleStatus,
    SamplingParams,
    Verdict,
)

_GENERATE = "plugins.generate"
_SAMPLE_HOOK = "plugins.sample_hook"
START_ROLLOUT_ID = "start_rollout_id"
"""In the metadata of a sample whose response was cut short: the step that did so first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What every group of a run has in common."""

    run_seed: int
    n_samples_per_prompt: int
    params: SamplingParams
    """Without a seed; each rollout gets its own."""
    max_context_length: int
    rollout_timeout_seconds: float
    failure_policy: GroupFailurePolicy
    failure_retries: int
    mask_offpolicy: bool = False
    """Whether tokens of older versions lose their weight when a response is gone on with."""
    mask_finished_members: bool = False
    """Whether they do in the finished members of its group, too."""


class GroupRunner:
    """Runs groups; any number of them at once."""

    def __init__(
        self,
        *,
        plan: GroupPlan,
        endpoint: Endpoint,
        tokenizer: Tokenizer,
        generate_fn: GenerateFn,
        default_generate_fn: GenerateFn,
        scorer: Scorer,
        sample_hook: SampleHook | None,
        failures: FailureBudget,
        observer: RolloutObserver,
    ) -> None:
        self._plan = plan
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._generate_fn = generate_fn
        self._default_generate_fn = default_generate_fn
        self._scorer = scorer
        self._sample_hook = sample_hook
        self._failures = failures
        self._observer = observer
        self._retries = plan.failure_retries if plan.failure_policy is GroupFailurePolicy.RETRY else 0
        self._reward_failures: Counter[Outcome] = Counter()
        self.num_generated_tokens = 0
        """Response tokens of all rollouts that have ended, used or not."""
        self.phases: dict[int, str] = {}
        """What each running group is doing, by group index."""

    @property
    def n_samples_per_prompt(self) -> int:
        """Rollouts of a group."""
        return self._plan.n_samples_per_prompt

    async def run(self, draft: Draft, *, step: int) -> GroupResult:
        """Finish the members of a group that have not finished, score them all, and return the group.

        Raises:
            RunFailedError: If the failure budget is spent.
        """
        draw = draft.draw
        if self._plan.mask_finished_members:
            draft.mask_finished(self._endpoint.policy_version)
        self.phases[draw.group_index] = "generating"
        try:
            rollouts = await self._generate_all(draft, step)
            if all(rollout.has_finished for rollout in rollouts):
                self.phases[draw.group_index] = "scoring"
                rollouts = await self._score(rollouts, draw)
            elif any(rollout.error is not None for rollout in rollouts):
                for _ in filter(_is_unscored, rollouts):
                    self._failures.succeed(draw.group_index)
        finally:
            del self.phases[draw.group_index]
        group = Group(group_index=draw.group_index, prompt=draw.prompt, rollouts=tuple(rollouts))
        cause = next((rollout.error for rollout in rollouts if rollout.error is not None), None)
        if cause is not None:
            return GroupResult(group=group, status=GroupStatus.FAILED, cause=cause)
        finished = all(rollout.has_finished for rollout in rollouts)
        return GroupResult(group=group, status=GroupStatus.FINISHED if finished else GroupStatus.ABORTED)

    async def _generate_all(self, draft: Draft, step: int) -> list[Rollout]:
        try:
            async with asyncio.TaskGroup() as tasks:
                for member, rollout in enumerate(draft.rollouts):
                    if not rollout.has_finished:
                        tasks.create_task(
                            self._rollout(draft, member, step), name=f"group {draft.draw.group_index}.{member}"
                        )
        except* RunFailedError as errors:
            raise errors.exceptions[0] from None
        return list(draft.rollouts)

    async def _rollout(self, draft: Draft, member: int, step: int) -> None:
        """Answer once, or go on with what there is, and put the outcome into the draft."""
        draw, before = draft.draw, draft.rollouts[member]
        request = self._request(draw, before, member, step)
        started = time.monotonic()
        for _ in range(1 + self._retries):
            try:
                async with asyncio.timeout(self._plan.rollout_timeout_seconds):
                    samples = await self._answer(request)
                seconds = before.seconds + time.monotonic() - started
                rollout = Rollout(rollout_id=request.rollout_id, samples=samples, seconds=seconds)
                break
            except Exception as error:
                # Failure isolation: whatever a generate function or hook raises fails its rollout only.
                cause = self._describe(error)
                self._failures.fail(draw.group_index, cause, where=_where(draw))
                rollout = _failed(request, f"{_where(draw)}: {cause}")
        draft.rollouts[member] = rollout
        self.num_generated_tokens += max(0, rollout.response_tokens - before.response_tokens)
        self._observer.rollout_finished(rollout)

    def _request(self, draw: PromptDraw, before: Rollout, member: int, step: int) -> RolloutRequest:
        plan = self._plan
        index = draw.group_index * plan.n_samples_per_prompt + member
        # Depends on what is sampled, never on when: two runs of one seed ask for the same tokens.
        seed = derive_seed(plan.run_seed, "rollout", step, draw.group_index, member)
        return RolloutRequest(
            prompt=draw.prompt,
            params=replace(plan.params, seed=seed),
            group_index=draw.group_index,
            index=index,
            rollout_id=index,
            step=step,
            max_context_length=plan.max_context_length,
            partial=self._partial(before),
        )

    def _partial(self, before: Rollout) -> Sample | None:
        """Return what can be gone on with: one sample with tokens; what has forked begins again."""
        if len(before.samples) != 1 or not before.samples[0].response_length:
            return None
        sample = before.samples[0]
        return sample.without_versions_before(self._endpoint.policy_version) if self._plan.mask_offpolicy else sample

    async def _answer(self, request: RolloutRequest) -> tuple[Sample, ...]:
        with blaming(_GENERATE, self._generate_fn):
            samples = await self._generate_fn(
                request, default=self._default_generate_fn, endpoint=self._endpoint, tokenizer=self._tokenizer
            )
        if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
            told = f"returned {samples!r:.80}; it must return a list of at least one Sample"
            raise complaint(_GENERATE, self._generate_fn, told)
        samples = [_with_origin(sample, request.partial) for sample in samples]
        if self._sample_hook is None or any(sample.status is SampleStatus.ABORTED for sample in samples):
            return tuple(samples)
        with blaming(_SAMPLE_HOOK, self._sample_hook):
            hooked = tuple(self._sample_hook(sample, request.prompt) for sample in samples)
        for sample in hooked:
            if not isinstance(sample, Sample):
                told = f"returned {sample!r:.80}; return the sample to go on with"
                raise complaint(_SAMPLE_HOOK, self._sample_hook, told)
        return hooked

    async def _score(self, rollouts: list[Rollout], draw: PromptDraw) -> list[Rollout]:
        """Score the rollouts, trying those again whose grading failed; what still fails is a failed rollout."""
        for _ in range(1 + self._retries):
            verdicts = await self._scorer.score(rollouts, draw.prompt)
            self._count(rollouts, verdicts, draw)
            scored = [_scored(rollout, verdict, draw) for rollout, verdict in zip(rollouts, verdicts, strict=True)]
            if all(verdict.outcome is Outcome.OK for verdict in verdicts):
                return scored
            rollouts = [new if new.error is None else old for new, old in zip(scored, rollouts, strict=True)]
        return scored

    def _count(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], draw: PromptDraw) -> None:
        failed = {id(verdict): verdict for verdict in verdicts if verdict.outcome is not Outcome.OK}
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            if verdict.outcome is not Outcome.OK:
                self._reward_failures[verdict.outcome] += 1
            elif rollout.verdict is None:
                self._failures.succeed(draw.group_index)
        # A call that was to score several rollouts is one failure, whatever the size of the group.
        for verdict in failed.values():
            self._failures.fail(draw.group_index, _reward_cause(verdict), where=_where(draw))

    def take_reward_failures(self) -> dict[str, int]:
        """Return how many gradings failed since the last call, by outcome."""
        counts = {each.value: self._reward_failures[each] for each in (Outcome.TIMEOUT, Outcome.ERROR)}
        self._reward_failures.clear()
        return counts

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"not answered within rollout_timeout_seconds = {self._plan.rollout_timeout_seconds:g}"
        return describe(error)


def _with_origin(sample: Sample, partial: Sample | None) -> Sample:
    """Return the sample with the step at which its response was first cut short, if it was."""
    if partial is None or START_ROLLOUT_ID not in partial.metadata or START_ROLLOUT_ID in sample.metadata:
        return sample
    return replace(sample, metadata={**sample.metadata, START_ROLLOUT_ID: partial.metadata[START_ROLLOUT_ID]})


def _scored(rollout: Rollout, verdict: Verdict, draw: PromptDraw) -> Rollout:
    if verdict.outcome is Outcome.OK:
        return rollout.with_reward(verdict)
    samples = tuple(replace(sample, status=SampleStatus.FAILED) for sample in rollout.samples)
    return replace(rollout, samples=samples, verdict=verdict, error=f"{_where(draw)}: {_reward_cause(verdict)}")


def _is_unscored(rollout: Rollout) -> bool:
    return rollout.has_finished and rollout.verdict is None


def _where(draw: PromptDraw) -> str:
    return f"prompt {draw.prompt.prompt_id}"


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
