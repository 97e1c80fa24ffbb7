"""Rewards, filters, buffer filters, hooks and reward post-processing of slime as functions of ours."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.compat.slime_plugins.read_back import changed, changed_sample, guarded, is_slime_sample, slime_sample
from rollfeed.compat.slime_plugins.shared_run import RUNNING, Adapter, SlimeRun, awaited
from rollfeed.compat.slime_plugins.slime_paths import SLIME, is_slime_path
from rollfeed.compat.slime_plugins.supplied import sample_class
from rollfeed.faults import once_started
from rollfeed.types import Drop, FilterDecision, Group, Keep, Prompt, Sample


async def _result(adapter: Adapter, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the run's args; it is async, as slime's are, or plain, and runs in a thread."""
    function, args = adapter.call, (adapter.run.args, *args)
    RUNNING.set(adapter.run)  # in the task of this call
    if not inspect.iscoroutinefunction(function):
        return await awaited(await asyncio.to_thread(function, *args, **kwargs))
    return await function(*args, **kwargs)


def _looked_at(adapter: Adapter, samples: Sequence[Any], before: Any) -> None:
    if told := changed(samples, before):
        raise adapter.broke(told)


def in_groups(samples: Sequence[Any]) -> list[Any]:
    """Return the samples of a group as slime has them: one each, or a list each where one has forked."""
    by_rollout: dict[Any, list[Any]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    nested = list(by_rollout.values())
    return nested if any(len(each) > 1 for each in nested) else [each[0] for each in nested]


class SlimeReward(Adapter):
    """``async def f(args, sample)``, as a ``RewardFn``."""

    async def __call__(self, sample: Sample, prompt: Prompt) -> Any:
        """Return what the function makes of one sample."""
        made = slime_sample(sample, prompt, sample_class())
        before = guarded([made])
        reward = await _result(self, made)
        _looked_at(self, [made], before)
        return reward


class NamedRewards(dict[str, Any]):
    """Reward functions by name, and those of slime by ``slime:`` path, which are loaded when a sample names them."""

    def __init__(self, own: Mapping[str, Any], run: SlimeRun) -> None:
        super().__init__(own)
        self._run = run

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name) and is_slime_path(name):
            with once_started():
                function = self._run.load(str(name).removeprefix(SLIME))
            self[str(name)] = SlimeReward(function, self._run, key="custom_rm_path")
        return super().__contains__(name)


async def _rewards(adapter: Adapter, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Any:
    """Have ``async def f(args, samples)`` score samples, one reward each."""
    made = [slime_sample(each, prompt, sample_class()) for each, prompt in zip(samples, prompts, strict=True)]
    before = guarded(made)
    rewards = await _result(adapter, made)
    _looked_at(adapter, made, before)
    return [each.reward for each in made] if rewards is None else rewards  # older functions set them


class SlimeBatchedReward(Adapter):
    """As a ``BatchedRewardFn``."""

    async def __call__(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Any:
        """Return what the function makes of samples."""
        return await _rewards(self, samples, prompts)


class SlimeGroupReward(Adapter):
    """As a ``GroupRewardFn``."""

    async def __call__(self, samples: Sequence[Sample], prompt: Prompt) -> Any:
        """Return what the function makes of the samples of a group."""
        return await _rewards(self, samples, [prompt] * len(samples))


class SlimeGroupFilter(Adapter):
    """``def f(args, samples)``, as a ``GroupFilter``: a ``DynamicFilterOutput``, or True to keep."""

    drops_on_true = False
    """Whether it is written for the older loop, which drops where it says True."""

    def __call__(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return what the function decides about a group."""
        made = [slime_sample(sample, None, sample_class()) for sample in samples]
        before = guarded(made)
        decision = self.call_in_run(in_groups(made))
        _looked_at(self, made, before)
        return self.decided(decision)

    def decided(self, decision: Any) -> FilterDecision:
        """Return what the function said as a decision of ours."""
        reason, usable = getattr(self.call, "__name__", "dynamic_filter"), False
        if not isinstance(decision, bool | np.bool_):
            if self.drops_on_true or not isinstance(getattr(decision, "keep", None), bool | np.bool_):
                must = "True (drop) or False (keep)" if self.drops_on_true else "a DynamicFilterOutput, or True to keep"
                raise self.broke(f"returned {decision!r:.80}; it must return {must}")
            reason, usable = decision.reason or reason, bool(getattr(decision, "keep_when_insufficient", False))
            decision = decision.keep
        return Keep() if bool(decision) is not self.drops_on_true else Drop(str(reason), usable=usable)


class SlimeDropFilter(SlimeGroupFilter):
    """As :class:`SlimeGroupFilter`; True drops."""

    drops_on_true = True

    def __init__(self, function: Any, run: SlimeRun, *, key: str) -> None:
        super().__init__(function, run, key=key)
        run.drop_filters.append(function)


class SlimeBatchFilter(Adapter):
    """``def f(args, groups)``, the over-sampling filter: the groups that it wants, the best first."""

    def __call__(self, groups: Sequence[Group]) -> list[int]:
        """Return the indices of the groups that it returned."""
        made = [[slime_sample(each, group.prompt, sample_class()) for each in group.samples] for group in groups]
        before = [guarded(each) for each in made]
        shown = [in_groups(each) for each in made]
        chosen = self.call_in_run(list(shown))
        for each, values in zip(made, before, strict=True):
            _looked_at(self, each, values)
        return _indices(self, chosen, shown)


class SlimeBufferPolicy(Adapter):
    """``def f(args, rollout_id, buffer, num_samples)``: groups that it takes out of the buffer."""

    def __call__(self, entries: Sequence[Group], count: int, *, policy_version: int) -> list[int]:
        """Return the indices of the groups that it took."""
        del policy_version
        shown = [in_groups(self._samples(entry)) for entry in entries]
        buffer = list(shown)
        taken = self.call_in_run(None, buffer, count)
        indices = _indices(self, taken, shown)
        left = {id(group) for group in buffer} | {id(shown[index]) for index in indices}
        if any(id(group) not in left for group in shown):
            raise self.broke("took a group out of the buffer that it did not return")
        return indices

    def _samples(self, entry: Group) -> list[Any]:
        if entry.samples:
            return [slime_sample(sample, entry.prompt, sample_class()) for sample in entry.samples]
        made = []
        for member in range(self.run.args.n_samples_per_prompt):
            sample = sample_class()()
            sample.group_index, sample.prompt, sample.rollout_id = entry.group_index, entry.prompt.text, member
            sample.index = entry.group_index * self.run.args.n_samples_per_prompt + member
            made.append(sample)
        return made


def _indices(adapter: Adapter, chosen: Any, shown: Sequence[Any]) -> list[int]:
    """Return which of the groups shown were chosen."""
    known = {id(group): index for index, group in enumerate(shown)}
    first = {id(group[0][0] if isinstance(group[0], list) else group[0]): i for i, group in enumerate(shown) if group}
    if not isinstance(chosen, list | tuple) or not all(isinstance(group, list | tuple) and group for group in chosen):
        raise adapter.broke(f"returned {chosen!r:.80}; it must return a list of the groups that it was given")
    indices = []
    for group in chosen:
        sample = group[0][0] if isinstance(group[0], list) else group[0]
        index = known.get(id(group), first.get(id(sample)))
        if index is None:
            raise adapter.broke("returned a group that it was not given")
        indices.append(index)
    return indices


class SlimeAdvantage(Adapter):
    """``def f(args, samples)``, reward post-processing: rewards as they were, and what is trained with."""

    def __call__(self, rewards_G: NDArray[np.float64], *, group: Group) -> NDArray[np.float64]:
        """Return the processed rewards of one group as its advantages, one a sample."""
        made = [slime_sample(sample, group.prompt, sample_class()) for sample in group.samples]
        before = guarded(made)
        result = self.call_in_run(made)
        _looked_at(self, made, before)
        must = f"it must return (raw rewards, processed rewards), {len(made)} numbers each"
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.broke(f"returned {result!r:.80}; {must}")
        processed = np.asarray(result[1], np.float64)
        if processed.shape != (len(made),):
            raise self.broke(f"returned processed rewards of shape {processed.shape}; {must}")
        return processed


class SlimeSampleHook(Adapter):
    """``def f(args, sample)``, or async: the sample to use, or None for the one it was given."""

    async def __call__(self, sample: Sample, prompt: Prompt) -> Sample:
        """Return the sample, as the function leaves it."""
        made = slime_sample(sample, prompt, sample_class())
        before = vars(slime_sample(sample, prompt, sample_class()))
        returned = await _result(self, made, **self.extra(evaluation=False, rollout_id=None))
        used = made if returned is None else returned
        if not is_slime_sample(used):
            raise self.broke(f"returned {returned!r:.80}; it must return a Sample, or None")
        if vars(used) == before:
            return sample
        try:
            return changed_sample(used, sample, prompt)
        except ValueError as error:
            raise self.broke(f"returned {error}") from None
