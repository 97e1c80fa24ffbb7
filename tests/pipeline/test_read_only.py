"""What functions of users are handed cannot be written to, and what they hand back neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.batch.advantages import batch_advantages
from rollfeed.config import AdvantageSettings
from rollfeed.generate import default_generate
from rollfeed.testing import ScriptedEngine
from rollfeed.types import Correct, Group, Keep, Prompt, Rollout, Sample, SamplingMask, Verdict


def arrays(sample: Sample) -> list[NDArray[Any]]:
    mask = sample.sampling_mask
    found = [sample.token_ids, sample.loss_mask, sample.logprobs, sample.teacher_logprobs]
    return [each for each in [*found, mask and mask.lengths, mask and mask.token_ids] if each is not None]


async def test_x15_arrays_that_plug_ins_are_handed_are_read_only(make_rollouts: Any) -> None:
    seen: dict[str, list[bool]] = {}

    def note(name: str, *given: NDArray[Any]) -> None:
        seen.setdefault(name, []).extend(each.flags.writeable for each in given)

    async def generate(request: Any, *, services: Any) -> list[Sample]:
        note("generate", request.prompt.token_ids)
        made = await default_generate(request, services=services)
        rows = [np.array([each], np.int32) for each in made[0].response_token_ids]
        own = {name: getattr(made[0], name).copy() for name in ("token_ids", "loss_mask", "logprobs")}
        return [replace(made[0], **own, sampling_mask=SamplingMask.of(rows))]

    def hook(sample: Sample, prompt: Prompt) -> Sample:
        note("hook", prompt.token_ids, *arrays(sample))
        return replace(sample, logprobs=sample.logprobs.copy())

    class Teacher:
        async def logprobs(self, sample: Sample) -> NDArray[np.float32]:
            note("teacher", *arrays(sample))
            return np.full(sample.response_length, -0.5, np.float32)

    class Scores:
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            for each in rollouts:
                note("score", *arrays(each.samples[0]))
            return [Verdict(reward=float(each.rollout_id % 2), correct=Correct.YES) for each in rollouts]

        def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
            return True

    def group_filter(samples: Sequence[Sample]) -> Keep:
        note("filter", *(array for sample in samples for array in arrays(sample)))
        return Keep()

    def advantage(rewards_G: NDArray[np.float64], *, group: Group) -> NDArray[np.float64]:
        note("advantage", rewards_G, *(array for sample in group.samples for array in arrays(sample)))
        return rewards_G - rewards_G.mean()

    parts = {"generate_fn": generate, "sample_hook": hook, "teacher": Teacher(), "scorer": Scores()}
    async with make_rollouts(
        ScriptedEngine(answer=lambda request: "12"), group_filter=group_filter, **parts
    ) as rollouts:
        batch = await rollouts.generate_batch()
    batch_advantages(batch.groups, settings=AdvantageSettings(), function=advantage)
    assert set(seen) == {"generate", "hook", "teacher", "score", "filter", "advantage"}
    assert not any(map(any, seen.values())), {name for name, given in seen.items() if any(given)}
