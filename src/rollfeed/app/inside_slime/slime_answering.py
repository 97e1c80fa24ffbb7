"""Answers, scores and filters slime's samples, with its functions where it names some.

What it makes is written into their samples; a sample of ours says no more than how the answering ended.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.app.inside_slime.slime_groups import SlimeGroups, SlimeMember
from rollfeed.app.inside_slime.slime_job import (
    FILTER,
    GENERATE,
    HOOKS,
    REWARD,
    SlimeJob,
    SlimeWork,
    flag,
    named_function,
)
from rollfeed.compat.slime_plugins.adapters import SlimeGroupFilter
from rollfeed.compat.slime_plugins.checking import is_of_miles
from rollfeed.compat.slime_plugins.names.engine_calls import sampling_params
from rollfeed.compat.slime_plugins.names.rm_hub import graded
from rollfeed.compat.slime_plugins.shared_run import awaited, hooked, leaves, told_of_evaluation
from rollfeed.config import RolloutConfig
from rollfeed.errors import EngineProtocolError
from rollfeed.faults import blaming
from rollfeed.pipeline import GroupPlan, Observers
from rollfeed.pipeline.groups import EngineGate, FailureBudget, GroupRunner
from rollfeed.protocols import RolloutRequest, Scorer, Services
from rollfeed.rewards.calls import blamed, failure
from rollfeed.rewards.results import to_verdict
from rollfeed.types import (
    FilterDecision,
    FinishKind,
    Keep,
    Outcome,
    Prompt,
    Rollout,
    RoutedExperts,
    Sample,
    SampleStatus,
    SamplingParams,
    Verdict,
)

_NOTHING = np.empty(0, np.float32)
_STATUS = {FinishKind.STOP: "completed", FinishKind.LENGTH: "truncated", FinishKind.ABORT: "aborted"}
_ENDED = ("completed", "truncated")


class SlimeAnswering(Scorer):
    """Stands where a run has its generate function, its scorer and its filter, for the groups of one call."""

    def __init__(
        self, work: SlimeWork, job: SlimeJob, groups: SlimeGroups, *, rollout_id: int, evaluation: bool = False
    ) -> None:
        self._work, self._args, self._functions, self._groups = work, job.args, job.functions, groups
        self.gate = EngineGate(work.engine, max_requests_in_flight=job.config.rollout.max_requests_in_flight)
        self._about: dict[str, Any] = {"evaluation": evaluation, "rollout_id": rollout_id}
        self._agents = asyncio.Semaphore(job.config.rollout.max_requests_in_flight or 1)
        own = getattr(job.args, "eval_reward_key", None) if evaluation else None
        self.reward_key = own or job.config.reward.reward_key
        """Which of named rewards counts."""
        chosen = job.functions.get(FILTER)
        self._filter = None if chosen is None else SlimeGroupFilter(chosen, work.run, key=flag(FILTER))
        self._masks_old = job.config.rollout.mode == "partial" and bool(
            getattr(job.args, "mask_offpolicy_in_partial_rollout", False)
        )

    def runner(self, config: RolloutConfig, failures: FailureBudget, *, params: SamplingParams) -> GroupRunner:
        """Return what answers groups with it."""
        plan = GroupPlan(
            settings=config.rollout,
            seed=config.seed,
            params=params,
            max_context_length=config.sampling.rollout_max_context_len or self._work.engine.context_length,
            generate_fn=self.generate,
            services=self._work.services.for_generating(self.gate, self._work.tokenizer, config=config),
            scorer=self,
        )
        return GroupRunner(plan, gate=self.gate, failures=failures, observer=Observers())

    async def generate(self, request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
        """Answer a sample of theirs, or go on with it; as a ``GenerateFn``."""
        member = self._groups.member(request.index)
        made = sample = member.begin()
        if self._masks_old and sample.response_length:
            sample.loss_mask = [0] * sample.response_length
        if sample.status.value not in _ENDED:
            path, function = getattr(sample, "generate_function_path", None), self._functions.get(GENERATE)
            function = named_function(path, GENERATE) if path else function
            if function is None:
                await self._answer(sample, request, services)
            else:
                async with self._agents:
                    made = await self._ask(function, sample, request)
            if not any(each.status.value == "aborted" for each in leaves([made])):
                hook_at = partial(named_function, name=HOOKS)
                made = await hooked(made, self._args, hook_at, **self._about)
        member.made = made
        return [_ending(member, request)]

    async def _answer(self, sample: Any, request: RolloutRequest, services: Services) -> None:
        ids = request.prompt.token_ids
        if sample.tokens:
            ids = np.asarray(sample.tokens, np.int32)
        elif sample.prompt != request.prompt.text:  # that of the group's first
            ids = services.tokenizer.encode(sample.prompt, add_special_tokens=False)
        before, params, logprobs = sample.response_length, request.params, sample.rollout_log_probs or []
        if {len(logprobs), len(sample.loss_mask or logprobs)} != {before}:
            parts = f"a response of {before} tokens, and rollout_log_probs or a loss_mask of another length"
            raise ValueError(f"sample {sample.index} has {parts}: it cannot be gone on with")
        budget = min(params.max_new_tokens - before, request.max_context_length - len(ids))
        sample.tokens, sample.rollout_log_probs = sample.tokens or ids.tolist(), logprobs
        if budget <= 0:
            sample.status = type(sample).Status("truncated")
            return
        least = min(budget, max(0, params.min_new_tokens - before))
        params = replace(params, max_new_tokens=budget, min_new_tokens=least)
        name = f"{'eval' if self._about['evaluation'] else 'step'}{self._about['rollout_id']}-rollout{request.index}"
        completion = await services.endpoint.generate(ids, params, request_id=name)
        if completion.routed_experts is not None:
            sample.rollout_routed_experts = self._experts(sample, completion.routed_experts)
        new = completion.token_ids.tolist()
        sample.tokens = [*sample.tokens, *new]
        sample.response_length = before + len(new)
        sample.rollout_log_probs = [*logprobs, *completion.logprobs.tolist()]
        # Older slimes leave it None.
        if new and (sample.loss_mask is not None or hasattr(sample, "append_response_tokens")):
            sample.loss_mask = [*([1] * before if sample.loss_mask is None else sample.loss_mask), *[1] * len(new)]
        sample.response = completion.text
        if before:  # a character may be split between the two
            ids_of_response = sample.tokens[-sample.response_length :]
            sample.response = services.tokenizer.decode(ids_of_response, skip_special_tokens=params.skip_special_tokens)
        versions = [str(span.policy_version) for span in completion.version_spans]
        sample.weight_versions = [*sample.weight_versions, *versions]
        sample.status = type(sample).Status(_STATUS[completion.finish_reason.kind])
        if hasattr(sample, "prefix_cache_info"):
            told = {"cached_tokens": completion.cached_tokens, "prompt_tokens": completion.prompt_tokens}
            sample.prefix_cache_info.add(told)

    def _experts(self, sample: Any, told: RoutedExperts) -> NDArray[np.int32]:
        """Return the experts of a sample as slime trains with them, ``(tokens - 1, layers, experts a token)``."""
        layers, chosen = self._args.num_layers, self._args.moe_router_topk
        if told.per_token != layers * chosen:
            raise EngineProtocolError(
                f"the server returns {told.per_token} experts a token, where --num-layers {layers} and "
                f"--moe-router-topk {chosen} make {layers * chosen}"
            )
        experts = told.numbers.astype(np.int32).reshape(told.num_tokens, layers, chosen)
        before = getattr(sample, "rollout_routed_experts", None)  # what a token was sampled with stays
        return experts if before is None else np.concatenate([before, experts[len(before) :]])

    async def _ask(self, function: Any, sample: Any, request: RolloutRequest) -> Any:
        if self.gate.is_closed:
            sample.status = type(sample).Status("aborted")
            return sample
        params, evaluation = sampling_params(request.params), self._about["evaluation"]
        with blaming(flag(GENERATE), function):
            if is_of_miles(function):
                rollout = f"{self._work.package}.rollout"
                state = importlib.import_module(f"{rollout}.sglang_rollout").GenerateState(self._args)
                form = importlib.import_module(f"{rollout}.base_types").GenerateFnInput
                made = await function(form(state, sample, params, evaluation))
                made = getattr(made, "samples", made)
            else:
                made = await function(self._args, sample, params, **told_of_evaluation(function, evaluation))
            if not made or not all(hasattr(each, "status") for each in leaves([made])):
                raise TypeError(f"it returned {made!r:.80}; it must return a Sample, or a list of at least one")
        return made

    def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        """Whether a sample is scored without the others of its group."""
        del rollout, prompt
        return not getattr(self._args, "group_rm", False)

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        """Score what has no reward yet; rewards are written into the samples."""
        members = [self._groups.member(rollout.rollout_id) for rollout in rollouts]
        is_alone = self.scores_alone(rollouts[0], prompt)
        try:
            if not is_alone:
                await self._score_together([member.made for member in members])
            for member in members if is_alone else ():
                if isinstance(member.made, list):
                    await self._score_together([leaf for leaf in member.made if leaf.reward is None])
                elif member.made.reward is None:
                    member.made.reward = await self._reward(member.made)
        except Exception as error:  # whatever a judge raises is no reward of 0
            verdict, function = failure(error), self._functions.get(REWARD)
            told = verdict if function is None else blamed(verdict, setting=flag(REWARD), function=function)
            return [told] * len(rollouts)
        return [self._verdict(member) for member in members]

    async def _score_together(self, samples: list[Any]) -> None:
        """Score samples, or answerings of several, in one call of their function where there is one."""
        function, last = self._functions.get(REWARD), [leaves([each])[-1] for each in samples]
        rewards: Any = None
        if samples and function is not None:
            rewards = await awaited(function(self._args, samples))
        elif samples:
            rewards = await asyncio.gather(*map(self._reward, last))
        for each, reward in zip(samples, [each.reward for each in last] if rewards is None else rewards, strict=True):
            for leaf in leaves([each]):
                leaf.reward = reward

    async def _reward(self, sample: Any) -> Any:
        """Return what a sample's own function, the job's, or the grader of its ``rm_type`` gives it."""
        path, function = getattr(sample, "custom_rm_path", None), self._functions.get(REWARD)
        function = named_function(path, REWARD) if path else function
        if function is not None:
            return await awaited(function(self._args, sample))
        return await graded(self._work.hub, sample, reward_key=self.reward_key)

    def _verdict(self, member: SlimeMember) -> Verdict:
        verdict = to_verdict(leaves([member.made])[-1].reward, reward_key=self.reward_key)
        if verdict.outcome is not Outcome.OK:  # another try begins without it
            for leaf in leaves([member.made]):
                leaf.reward = None
        return verdict

    def decide(self, samples: Sequence[Sample]) -> FilterDecision:
        """Keep or drop a group; as a ``GroupFilter``."""
        if self._filter is None:
            return Keep()
        return self._filter.decided(self._filter.call_in_run(self._groups.drawn[samples[0].group_index].made))


def _ending(member: SlimeMember, request: RolloutRequest) -> Sample:
    """Return a sample of ours that says how an answering ended; its tokens are in theirs."""
    found = [each.status.value for each in leaves([member.made])]
    told = "aborted" if "aborted" in found else found[-1]
    return Sample(
        token_ids=request.prompt.token_ids,
        response_length=0,
        loss_mask=_NOTHING,
        logprobs=_NOTHING,
        version_spans=(),
        # What failed in a way that their function could tell is scored and trained on as they say.
        status=SampleStatus(told) if told in (*_ENDED, "aborted") else SampleStatus.COMPLETED,
        group_index=request.group_index,
        index=request.index,
        rollout_id=request.rollout_id,
    )
