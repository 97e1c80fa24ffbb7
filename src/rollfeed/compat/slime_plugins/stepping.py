"""slime's whole rollout functions as functions of ours.

A function runs in a thread of its own, as slime's may block; groups are answered in the loop of the run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rollfeed.base.waiting import call_in_own_thread
from rollfeed.compat.slime_plugins.adapters import in_groups
from rollfeed.compat.slime_plugins.names.engine_calls import default_params
from rollfeed.compat.slime_plugins.read_back import (
    asked_sample,
    changed_sample,
    is_slime_sample,
    own_sample,
    slime_sample,
)
from rollfeed.compat.slime_plugins.shared_run import CURRENT, Adapter, Work, leaves
from rollfeed.compat.slime_plugins.supplied import sample_class
from rollfeed.completions import check_sample
from rollfeed.errors import EngineProtocolError, RunFailedError
from rollfeed.protocols import RolloutContext, RolloutFn, RolloutRequest
from rollfeed.seeds import rollout_seed
from rollfeed.types import (
    Drop,
    Dropped,
    Ending,
    Failed,
    Group,
    Outcome,
    Requeued,
    Rollout,
    Sample,
    SampleStatus,
    Surplus,
    Trained,
    Verdict,
)

T = TypeVar("T")
NOT_RETURNED = "not_returned"
"""The reason of a finished group that a rollout function left out."""


class SlimeSampleFilter(Adapter):
    """``def f(args, groups)``, the sample filter, as a ``RolloutFn``: changes samples that will be trained on."""

    inner: RolloutFn | None = None
    """Makes the steps; by default the run's scheduler."""

    async def __call__(self, context: RolloutContext) -> Sequence[Ending]:
        """Make a step, and have the function see the groups of its batch, in order."""
        step = self.inner or self.run.default_rollout
        if step is None:
            raise RunFailedError(f"{self.key}: the run has not been opened")
        endings = sorted(await step(context), key=lambda ending: ending.group.group_index)
        groups = [ending.group for ending in endings if isinstance(ending, Trained)]
        shown = [_shown(group) for group in groups]
        self.call_in_run(shown)
        trained = [Trained(_as_left(self, group, made)) for group, made in zip(groups, shown, strict=True)]
        return [*trained, *(ending for ending in endings if not isinstance(ending, Trained))]


def _shown(group: Group) -> list[Any]:
    """Return the samples of a finished group as slime has them."""
    cls = sample_class()
    return in_groups([slime_sample(each, group.prompt, cls) for each in group.samples])


def _as_left(adapter: Adapter, group: Group, made: Sequence[Any]) -> Group:
    """Return a finished group with what a function changed in its samples; the same one where it changed nothing."""
    if [vars(each) for each in leaves(made)] == [vars(each) for each in leaves(_shown(group))]:
        return group
    nested, rollouts = [each if isinstance(each, list) else [each] for each in made], []
    for rollout, parts in zip(group.rollouts, nested, strict=True):
        try:
            read = [
                changed_sample(leaf, sample, group.prompt) for leaf, sample in zip(parts, rollout.samples, strict=True)
            ]
        except ValueError as error:
            raise adapter.broke(f"returned {error}") from None
        rollouts.append(replace(rollout, samples=tuple(read), verdict=_verdict(read) or rollout.verdict))
    return replace(group, rollouts=tuple(rollouts))


class SlimeRollout(Adapter):
    """``def f(args, rollout_id, data_source, evaluation=False)``, plain or async, as a ``RolloutFn``."""

    async def __call__(self, context: RolloutContext) -> Sequence[Ending]:
        """Have the function make a step, and return where its groups went."""
        if self.run.services is None:
            raise RunFailedError(f"{self.key}: the run has not been opened")
        work = Work(run=self.run, services=self.run.services, step=context.step)
        work.bridge = bridge = Bridge(self, context, work)
        args = self.run.args.changed(rollout_batch_size=context.rollout_batch_size)
        if self.run.state is not None:
            self.run.state.args = args
            self.run.state.reset()
        token = CURRENT.set(work)
        try:
            output, raised = await call_in_own_thread(
                partial(self._step, args, context.step, bridge), name="slime rollout"
            )
        finally:
            CURRENT.reset(token)
        if raised is not None:
            raise raised if isinstance(raised, Exception) else RunFailedError(repr(raised))
        return bridge.endings(output)

    def _step(self, args: Any, step: int, bridge: Bridge) -> Any:
        output = self.call(args, step, bridge, **self.extra(evaluation=False))
        return asyncio.run(output) if inspect.iscoroutine(output) else output


class Bridge:
    """The ``data_source`` of a rollout function; older ones call it. What it handed out is known by its group."""

    def __init__(self, adapter: SlimeRollout, context: RolloutContext, work: Work) -> None:
        self._adapter = adapter
        self._context = context
        self._work = work
        self._drawn: dict[int, Group] = {}
        self._answered: dict[int, Group] = {}
        self._tasks: dict[int, asyncio.Task[Group]] = {}
        self._native: Sequence[Ending] = ()
        self._given_back: dict[int, list[Any]] = {}
        self._surplus = {group.group_index: group for group in context.surplus}
        self.metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return groups to be answered: finished ones that are left, then waiting ones, then new ones."""
        kept = [self._surplus.pop(index) for index in list(self._surplus)[:num_samples]]
        self._answered |= {group.group_index: group for group in kept}
        more = self._wait(self._context.draw(num_samples - len(kept))) if len(kept) < num_samples else []
        groups = [*kept, *more]
        self._drawn |= {group.group_index: group for group in groups}
        return [self._samples(group) for group in groups]

    __call__ = get_samples

    def add_samples(self, samples: Sequence[list[Any]]) -> None:
        """Take groups back: finished ones are kept for a later step, others are answered again or resumed."""
        for group in samples:
            first = leaves(group)[0]
            if first.group_index not in self._drawn:
                raise self._adapter.broke(f"gave back group {first.group_index}, which it was not given in this step")
            self._given_back[first.group_index] = list(group)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Note something for the rest of the step."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return what was noted."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Return how many finished groups are left from earlier steps."""
        return len(self._surplus)

    __len__ = get_buffer_length

    async def answer(self, group: list[Any]) -> Any:
        """Have the run answer and score a group, and return it; its samples are filled in where they lie."""
        drawn = self._drawn_group(leaves(group)[0])
        if any(each.prompt != drawn.prompt.text for each in leaves(group)):
            raise self._adapter.broke(f"changed the prompt of group {drawn.group_index}: a prompt source gives prompts")
        made = self._samples(await self._work.on_loop(self._submitted(drawn)))
        if len(made) == len(group) and not any(isinstance(each, list) for each in (*made, *group)):
            for old, new in zip(group, made, strict=True):
                vars(old).update(vars(new))
            return group
        return made

    async def answer_sample(self, sample: Any) -> Any:
        """Have the run answer and score the group of a sample, and return the sample, or what it became."""
        group = self._samples(self._drawn_group(sample))
        index = next((at for at, each in enumerate(group) if each.index == sample.index), None)
        if index is None:
            raise self._adapter.broke(f"asked for sample {sample.index} of group {sample.group_index}, which has none")
        made = self._samples(await self._work.on_loop(self._submitted(self._drawn_group(sample))))[index]
        if isinstance(made, list):
            return made
        vars(sample).update(vars(made))
        return sample

    async def _submitted(self, group: Group) -> Group:
        index = group.group_index
        if index not in self._answered:
            if index not in self._tasks:
                self._tasks[index] = self._context.submit(group)
            self._answered[index] = await asyncio.shield(self._tasks[index])
        return self._answered[index]

    def _drawn_group(self, sample: Any) -> Group:
        group = self._drawn.get(sample.group_index)
        if group is None:
            raise self._adapter.broke(f"asked for group {sample.group_index}, which it was not given in this step")
        return group

    async def abort(self) -> None:
        """End all that is in flight."""
        await self._work.on_loop(self._context.abort())

    async def make_step(self) -> list[Any]:
        """Have the run's own scheduler make the step, and return its groups."""
        return await self._work.on_loop(self._make_step())

    async def _make_step(self) -> list[Any]:
        rollout = self._work.run.default_rollout
        if rollout is None:
            raise RunFailedError("generate_rollout: the run has no scheduler of its own")
        self._native = await rollout(self._context)
        trained = [ending.group for ending in self._native if isinstance(ending, Trained)]
        self._answered |= {group.group_index: group for group in trained}
        self._drawn |= {group.group_index: group for group in trained}
        return [self._samples(group) for group in trained]

    def _request(self, group: Group, index: int) -> RolloutRequest:
        args, member = self._work.run.args, index - group.group_index * self._work.run.args.n_samples_per_prompt
        seed = rollout_seed(args.rollout_seed, step=self._work.step, group_index=group.group_index, member=member)
        before = group.rollouts[member].samples if group.rollouts else ()
        return RolloutRequest(
            prompt=group.prompt,
            params=replace(default_params(args, self._work.run.params), seed=seed),
            group_index=group.group_index,
            index=index,
            rollout_id=index,
            step=self._work.step,
            max_context_length=args.rollout_max_context_len or self._work.run.context_length,
            partial=next((each for each in before if len(before) == 1 and each.response_length), None),
        )

    def _samples(self, group: Group) -> list[Any]:
        cls, size = sample_class(), self._work.run.args.n_samples_per_prompt
        first = group.group_index * size
        if not group.rollouts:
            return [asked_sample(self._request(group, first + member), cls) for member in range(size)]
        made: list[Any] = []
        for member, rollout in enumerate(group.rollouts):
            shown = [slime_sample(sample, group.prompt, cls) for sample in rollout.samples]
            asked = [] if shown else [asked_sample(self._request(group, first + member), cls)]
            made.extend(shown or asked)
        return in_groups(made)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            is_here = asyncio.get_running_loop() is self._work.loop
        except RuntimeError:
            is_here = False
        if is_here:
            work.close()
            raise self._adapter.broke("asks for samples in the loop of the run, which it would block: use its own")
        return asyncio.run_coroutine_threadsafe(work, self._work.loop).result()

    def endings(self, output: Any) -> list[Ending]:
        """Return where the groups of the step went, given what the function returned."""
        returned = self._returned(output)
        ends: list[Ending] = [Trained(self._read(index, made)) for index, made in returned.items()]
        ends += [each for each in self._native if not isinstance(each, Trained)]
        named = returned.keys() | {each.group.group_index for each in ends}
        for index, made in self._given_back.items():
            if index not in named and index not in self._answered:
                ends.append(Requeued(self._drawn[index], "given_back", kept=self._kept(index, made)))
        for index, group in self._answered.items():
            if index in named:
                continue
            if group.is_finished and index in self._given_back:
                ends.append(Surplus(group))
            elif group.is_finished:
                decision = self._context.decide(group)
                ends.append(Dropped(group, decision.reason if isinstance(decision, Drop) else NOT_RETURNED))
            elif group.error is not None:
                ends.append(Failed(group, group.error))
        return ends

    def _returned(self, output: Any) -> dict[int, list[Any]]:
        groups = getattr(output, "samples", output)
        if isinstance(output, tuple):
            groups, aborted = output if len(output) == 2 else (None, None)
            groups = getattr(groups, "samples", groups)
            if aborted:
                self.add_samples(aborted)
        must = "return a RolloutFnTrainOutput, a list of groups, or (groups, aborted groups)"
        if not isinstance(groups, list) or not all(isinstance(each, list) and each for each in groups):
            raise self._adapter.broke(f"returned {output!r:.80}; it must {must}")
        size, found = self._work.run.args.n_samples_per_prompt, dict[int, list[Any]]()
        for group in groups:
            parts = leaves(group)
            if len(group) != size or not all(map(is_slime_sample, parts)):
                raise self._adapter.broke(f"returned a group of {len(group)}, where n_samples_per_prompt is {size}")
            index = parts[0].group_index
            if index in found or index not in self._drawn or {each.group_index for each in parts} != {index}:
                raise self._adapter.broke(f"returned group {index} twice, mixed, or without having been given it")
            found[index] = group
        return found

    def _read(self, index: int, made: list[Any]) -> Group:
        """Return a group as the function leaves it."""
        answered = self._answered.get(index)
        if answered is None:
            return replace(self._drawn[index], rollouts=self._rollouts(index, made))
        return _as_left(self._adapter, answered, made)

    def _rollouts(self, index: int, made: list[Any]) -> tuple[Rollout, ...]:
        """Return rollouts that the function made itself."""
        rollouts, size = [], self._work.run.args.n_samples_per_prompt
        for member, each in enumerate(made):
            number, parts = index * size + member, each if isinstance(each, list) else [each]
            request, sent = self._request(self._drawn[index], number), self._work.sent
            version = self._work.services.endpoint.policy_version
            try:
                samples = tuple(own_sample(leaf, request, sent, policy_version=version) for leaf in parts)
                for sample in samples:
                    check_sample(sample, request, limits=self._work.services.endpoint.limits)  # type: ignore[attr-defined]
            except (ValueError, EngineProtocolError) as error:
                raise self._adapter.broke(f"returned {error}") from None
            rollouts.append(Rollout(rollout_id=number, samples=samples, verdict=_verdict(samples)))
        return tuple(rollouts)

    def _kept(self, index: int, made: list[Any]) -> tuple[Rollout, ...] | None:
        parts = leaves(made)
        aborted = [each for each in parts if each.status.value == SampleStatus.ABORTED.value and each.response_length]
        if not self._work.run.args.partial_rollout or len(parts) != len(made) or not aborted:
            return None
        rollouts = self._rollouts(index, made)
        is_kept = (SampleStatus.ABORTED, SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        return tuple(each if each.status in is_kept else replace(each, samples=()) for each in rollouts)


def _verdict(samples: Sequence[Sample]) -> Verdict | None:
    """Return the verdict of a rollout whose samples bring their rewards."""
    rewards = [sample.reward for sample in samples]
    if rewards[-1] is None:
        return None
    return Verdict(reward=rewards[-1], outcome=Outcome.OK, correct=samples[-1].correct)
