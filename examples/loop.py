"""All of rollfeed in one loop: how a prompt becomes an update of the weights that answered it.

`rollfeed train` does the same with a scheduler, a ledger and a store around it; the parts are these. A character model
made on the spot, which knows nothing, learns to write words of two letters backwards, in a minute on one core:

    python examples/loop.py

Axes: G rollouts of a group, S samples of a batch.
"""

from __future__ import annotations

import asyncio
from statistics import fmean

from rollfeed.batch.advantages import batch_advantages
from rollfeed.config import TinyModelSettings
from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.environments import EnvironmentSource
from rollfeed.environments.builtin import ReverseText
from rollfeed.filters import RewardStd
from rollfeed.prompts import ChatRenderer, load_tokenizer
from rollfeed.protocols import Engine, RolloutRequest
from rollfeed.sample_builder import STATUS_OF, SampleBuilder
from rollfeed.seeds import derive_seed
from rollfeed.training.trainer import Trainer
from rollfeed.types import Group, Keep, Prompt, Rollout, SamplingParams, TensorUpdate, TrainBatch

SEED = 0
PROMPTS, ROLLOUTS = 16, 16  # a batch is so many groups of so many answers
LETTERS, LENGTH, CONTEXT = "abcd", 4, 32

DROP_EQUAL = RewardStd(n_samples_per_prompt=ROLLOUTS, reward_key=None)
ENVIRONMENT = ReverseText(style="compact", alphabet_size=len(LETTERS))  # asks "rev:ab=", and knows that "ba" is right


async def roll_out(engine: Engine, prompt: Prompt, *, step: int, group_index: int, member: int) -> Rollout:
    """Answer a prompt once and score the answer.

    The token ids and log-probabilities are kept as the engine gives them: the text is for the verifier, and never
    becomes tokens again. The seed says what the answer is, whichever request the engine happens to begin first.
    """
    rollout_id = group_index * ROLLOUTS + member
    seed = derive_seed(SEED, step, group_index, member) % 2**31
    request = RolloutRequest(
        prompt=prompt,
        params=SamplingParams(max_new_tokens=LENGTH, temperature=1.0, seed=seed, skip_special_tokens=True),
        group_index=group_index,
        index=rollout_id,
        rollout_id=rollout_id,
        step=step,
        max_context_length=CONTEXT,
    )
    completion = await engine.generate(prompt.token_ids, request.params, request_id=str(rollout_id))
    builder = SampleBuilder(request)
    builder.append_completion(completion)
    sample = builder.build(STATUS_OF[completion.finish_reason.kind], response=completion.text)
    verdict = ENVIRONMENT.verify(prompt.metadata["params"], completion.text)  # a reward of 0 to 1
    return Rollout(rollout_id=rollout_id, samples=(sample,)).with_reward(verdict)


async def make_group(engine: Engine, prompt: Prompt, *, step: int, group_index: int) -> Group:
    """Answer a prompt ROLLOUTS times at once; they share the prompt's keys and values in the engine."""
    answers = (
        roll_out(engine, prompt, step=step, group_index=group_index, member=member) for member in range(ROLLOUTS)
    )
    return Group(group_index=group_index, prompt=prompt, rollouts=tuple(await asyncio.gather(*answers)))


async def make_batch(engine: Engine, source: EnvironmentSource, *, step: int) -> tuple[TrainBatch, float]:
    """Return a batch of groups that teach something, with the advantage of each sample, and the mean reward of all.

    A group whose rewards are all equal says nothing of what to do more of: the filter drops it. The advantage of an
    answer is its reward above the mean of its group, over their standard deviation (GRPO).
    """
    prompts = await source.draw(PROMPTS)
    first = step * PROMPTS
    tasks = (make_group(engine, prompt, step=step, group_index=first + number) for number, prompt in enumerate(prompts))
    groups = await asyncio.gather(*tasks)
    kept = tuple(group for group in groups if isinstance(DROP_EQUAL(group.samples), Keep)) or tuple(groups)
    batch = TrainBatch(
        step=step,
        policy_version=step,
        groups=kept,
        advantages_S=batch_advantages(kept, settings=AdvantageSettings()),
        metrics={},
    )
    return batch, fmean(float(reward) for group in groups for reward in group.reward_values())


async def train(num_steps: int) -> list[float]:
    """Make batches and updates in turn; return the mean reward of every batch."""
    checkpoint = tiny_checkpoint(TinyModelSettings(characters=f"{LETTERS}rev:="), seed=SEED)
    tokenizer = load_tokenizer(checkpoint)
    engine = create_local_engine(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        threads=1,
        num_slots=PROMPTS * ROLLOUTS,
        context_length=CONTEXT,
        deterministic=True,
    )
    # The loss is the clipped policy loss, token by token; see rollfeed.training.losses for the others.
    trainer = Trainer(
        checkpoint,
        settings=TrainSettings(device="cpu", threads=1, optimizer=OptimizerSettings(learning_rate=2e-3)),
        temperature=1.0,
        num_batches=num_steps,
        max_response_length=LENGTH,
    )
    renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None)
    source = EnvironmentSource(ENVIRONMENT, level=0, seed=SEED, renderer=renderer, apply_chat_template=False)
    rewards = []
    async with engine:
        for step in range(num_steps):
            batch, reward = await make_batch(engine, source, step=step)
            report = await asyncio.to_thread(trainer.train_step, batch)
            # The next batch is sampled from the new weights: in memory here, from disk where engines are servers.
            await engine.apply(TensorUpdate(trainer.weights(), policy_version=trainer.step))
            rewards.append(reward)
            print(f"step {step}: reward {reward:.3f}, loss {report.metrics.get('train/loss', 0.0):+.4f}", flush=True)
    return rewards


if __name__ == "__main__":
    asyncio.run(train(80))
