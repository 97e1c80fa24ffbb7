"""rollfeed as a library: no settings file, plain functions.

python examples/library/library.py
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import rollfeed
from rollfeed.types import Prompt, Sample


def shortness(sample: Sample, prompt: Prompt, *, limit: int) -> float:
    """Reward short answers: 1 for none, 0 for ``limit`` tokens and more."""
    return max(0.0, 1.0 - sample.response_length / limit)


def drop_equal_lengths(samples: Sequence[Sample]) -> rollfeed.Keep | rollfeed.Drop:
    """Keep a group only when its answers differ in length."""
    lengths = {sample.response_length for sample in samples}
    return rollfeed.Keep() if len(lengths) > 1 else rollfeed.Drop("equal_lengths")


async def main() -> None:
    model = rollfeed.load_model()
    config = rollfeed.RolloutConfig(
        seed=3,
        rollout=rollfeed.RolloutSettings(rollout_batch_size=2, n_samples_per_prompt=4, over_sampling_batch_size=3),
        plugins=rollfeed.PluginSettings(reward=partial(shortness, limit=32), group_filters=[drop_equal_lengths]),
        sampling=rollfeed.SamplingSettings(rollout_max_response_len=32),
    )
    rollouts = rollfeed.open_rollouts(
        config,
        source=rollfeed.environment_source("core/copy_text", level=1, seed=3, tokenizer=model.tokenizer),
        engine=rollfeed.build_engine(model, rollfeed.EngineSettings(num_slots=12, context_length=256)),
        tokenizer=model.tokenizer,
    )
    async with rollouts:
        for _ in range(2):
            batch = await rollouts.generate_batch()
            for sample, advantage in zip(batch.samples, batch.advantages_S, strict=True):
                print(f"step {batch.step} group {sample.group_index} {advantage:+.2f} {sample.response!r}")


if __name__ == "__main__":
    asyncio.run(main())
