"""Answers one prompt n times and scores the answers.

Invariants: a group leaves the runner whole or not at all; an exception in one rollout fails that
rollout only; a rollout is scored while others are generated, unless its reward depends on them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import numpy as np

from rollfeed.config import GroupFailurePolicy, RolloutMode, RolloutSettings
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
    Prompt,
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

    settings: RolloutSettings
    seed: int
    """Of the run or set; the seeds of the rollouts derive from it."""
    params: SamplingParams
    """Without a seed; each rollout gets its own."""
    max_context_length: int
    evaluation: bool = False
    """Whether answers measure the policy and are not trained on."""


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
        self._settings = settings = plan.settings
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._generate_fn = generate_fn
        self._default_generate_fn = default_generate_fn
        self._scorer = scorer
        self._sample_hook = sample_hook
        self._failures = failures
        self._observer = observer
        self._retries = settings.failure_retries if settings.group_failure is GroupFailurePolicy.RETRY else 0
        self._reward_failures: Counter[Outcome] = Counter()
        self.num_generated_tokens = 0
        """Response tokens of all rollouts that have ended, used or not."""
        self.phases: dict[int, str] = {}
        """What each running group is doing, by group index."""

    @property
    def n_samples_per_prompt(self) -> int:
        """Rollouts of a group."""
        return self._settings.n_samples_per_prompt

    async def run(self, draft: Draft, *, step: int, on_generated: Callable[[], None] | None = None) -> GroupResult:
        """Finish the members of a group that have not finished, score those that are not scored, and return the group.

        Args:
            draft: What there is; filled as members are generated and scored.
            step: In which this happens.
            on_generated: Called once when nothing is left to be generated, unless it raises before.

        Raises:
            RunFailedError: If the failure budget is spent.
        """
        draw = draft.draw
        if self._settings.mask_offpolicy_finished_members:
            draft.mask_finished(self._endpoint.policy_version)
        self.phases[draw.group_index] = "generating"
        try:
            uncounted = sum(rollout.is_scored for rollout in draft.rollouts)
            await self._finish_members(draft, step, on_generated)
            unscored = [rollout for rollout in draft.rollouts if rollout.has_finished and not rollout.is_scored]
            if unscored and all(rollout.has_finished for rollout in draft.rollouts):
                await self._score(draft, range(len(draft.rollouts)))
            elif any(rollout.error is not None for rollout in draft.rollouts):
                uncounted += len(unscored)
        finally:
            del self.phases[draw.group_index]
        rollouts = draft.rollouts
        group = Group(group_index=draw.group_index, prompt=draw.prompt, rollouts=tuple(rollouts))
        cause = next((rollout.error for rollout in rollouts if rollout.error is not None), None)
        if cause is None and not all(rollout.has_finished for rollout in rollouts):
            return GroupResult(group=group, status=GroupStatus.ABORTED)
        for _ in range(uncounted):
            self._failures.succeed(draw.group_index)
        return GroupResult(group=group, status=GroupStatus.FAILED if cause else GroupStatus.FINISHED, cause=cause or "")

    async def _finish_members(self, draft: Draft, step: int, on_generated: Callable[[], None] | None) -> None:
        """Generate what is missing, each member scored as soon as it can be; all that is left is to score together."""
        prompt = draft.draw.prompt
        generating = {member for member, rollout in enumerate(draft.rollouts) if not rollout.has_finished}
        scoring: set[asyncio.Task[None]] = set()
        was_aborted = False

        async def finish(member: int) -> None:
            nonlocal was_aborted
            if member in generating:
                rollout = await self._rollout(draft, member, step)
                generating.discard(member)
                if not generating:
                    generated()
                if rollout.status is SampleStatus.ABORTED:
                    was_aborted = True
                    if self._settings.mode is RolloutMode.SYNC:
                        for task in scoring:  # nobody will ask for these verdicts
                            task.cancel()
            rollout = draft.rollouts[member]
            if rollout.has_finished and not was_aborted and self._scores_alone(rollout, prompt):
                scoring.add(task := cast(asyncio.Task[None], asyncio.current_task()))
                await self._score(draft, [member])
                scoring.discard(task)

        def generated() -> None:
            self.phases[draft.draw.group_index] = "scoring"
            if on_generated is not None:
                on_generated()

        if not generating:
            generated()
        try:
            async with asyncio.TaskGroup() as tasks:
                for member, rollout in enumerate(draft.rollouts):
                    if not rollout.is_scored:
                        tasks.create_task(finish(member), name=f"group {draft.draw.group_index}.{member}")
        except* Exception as errors:
            raise errors.exceptions[0] from None

    async def _rollout(self, draft: Draft, member: int, step: int) -> Rollout:
        """Answer once, or go on with what there is, and put the outcome into the draft."""
        draw, before = draft.draw, draft.rollouts[member]
        request = self._request(draw, before, member, step)
        started = time.monotonic()
        for _ in range(1 + self._retries):
            try:
                async with asyncio.timeout(self._settings.rollout_timeout_seconds):
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
        return rollout

    def _request(self, draw: PromptDraw, before: Rollout, member: int, step: int) -> RolloutRequest:
        plan = self._plan
        index = draw.group_index * self.n_samples_per_prompt + member
        # Depends on what is sampled, never on when: two runs of one seed ask for the same tokens.
        seed = derive_seed(plan.seed, "rollout", step, draw.group_index, member)
        return RolloutRequest(
            prompt=draw.prompt,
            params=replace(plan.params, seed=seed),
            group_index=draw.group_index,
            index=index,
            rollout_id=index,
            step=step,
            max_context_length=plan.max_context_length,
            partial=self._partial(before),
            evaluation=plan.evaluation,
        )

    def _partial(self, before: Rollout) -> Sample | None:
        """Return what can be gone on with: one sample with tokens; what has forked begins again."""
        if len(before.samples) != 1 or not before.samples[0].response_length:
            return None
        sample = before.samples[0]
        masks = self._settings.mask_offpolicy_in_partial_rollout
        return sample.without_versions_before(self._endpoint.policy_version) if masks else sample

    async def _answer(self, request: RolloutRequest) -> tuple[Sample, ...]:
        with blaming(_GENERATE, self._generate_fn):
            samples = await self._generate_fn(
                request, default=self._default_generate_fn, endpoint=self._endpoint, tokenizer=self._tokenizer
            )
        if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
            told = f"returned {samples!r:.80}; it must return a list of at least one Sample"
            raise complaint(_GENERATE, self._generate_fn, told)
        if unended := next((s for s in samples if s.status in (SampleStatus.PENDING, SampleStatus.FAILED)), None):
            told = f"returned a sample whose status is {unended.status.value}; raise where an answer cannot be made"
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

    def _scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        return all(self._scorer.scores_alone(part, prompt) for part in rollout.parts())

    async def _score(self, draft: Draft, members: Sequence[int]) -> None:
        """Score members, trying those again whose grading failed; what still fails is a failed rollout."""
        draw, rollouts = draft.draw, draft.rollouts
        for _ in range(1 + self._retries):
            before = [rollouts[member] for member in members]
            parts = [rollout.parts() for rollout in before]
            verdicts = iter(await self._scorer.score([part for each in parts for part in each], draw.prompt))
            scored = [
                rollout.with_verdicts(list(islice(verdicts, len(each))))
                for rollout, each in zip(before, parts, strict=True)
            ]
            for member, rollout in zip(members, scored, strict=True):
                rollouts[member] = rollout
            self._count(before, scored, draw)
            if all(rollout.is_scored for rollout in scored):
                return
        for member in members:
            rollouts[member] = _failed_if_unscored(rollouts[member], draw)

    def _count(self, before: Sequence[Rollout], scored: Sequence[Rollout], draw: PromptDraw) -> None:
        failed: dict[int, Verdict] = {}
        for old, new in zip(before, scored, strict=True):
            if new.verdict is not None and not new.is_scored:
                self._reward_failures[new.verdict.outcome] += 1
                failed[id(new.verdict)] = new.verdict
            elif not old.is_scored:
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
            return f"not answered within rollout_timeout_seconds = {self._settings.rollout_timeout_seconds:g}"
        return describe(error)


def _with_origin(sample: Sample, partial: Sample | None) -> Sample:
    """Return the sample with the step at which its response was first cut short, if it was."""
    if partial is None or START_ROLLOUT_ID not in partial.metadata or START_ROLLOUT_ID in sample.metadata:
        return sample
    return replace(sample, metadata={**sample.metadata, START_ROLLOUT_ID: partial.metadata[START_ROLLOUT_ID]})


def _failed_if_unscored(rollout: Rollout, draw: PromptDraw) -> Rollout:
    if rollout.is_scored or rollout.verdict is None:
        return rollout
    samples = tuple(replace(sample, status=SampleStatus.FAILED) for sample in rollout.samples)
    return replace(rollout, samples=samples, error=f"{_where(draw)}: {_reward_cause(rollout.verdict)}")


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
