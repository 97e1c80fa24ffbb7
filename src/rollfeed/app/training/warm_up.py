"""Teaches a model, before the first batch, the form of an answer and how sure it may be.

Labels of the run's own prompts are taught, some of them wrong on purpose, until sampled answers are right often enough
for reinforcement learning to go on from. The prompts come from the run's sources under a seed of their own, so those
that training and evaluation hold apart stay apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rollfeed.app.build import PreparedRun
from rollfeed.app.evaluation import PreparedEvaluation, evaluate
from rollfeed.app.sources import build_source
from rollfeed.app.training.remote_trainer import RemoteTrainer, RemoteUpdates, RunTrainer
from rollfeed.config import EvalKeys, EvalSettings, WarmUpSettings
from rollfeed.conversations import answer_tokens
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.evaluation import EvalSet, SetResult, TrainingDefaults, plan_set
from rollfeed.protocols import Engine, PromptSource, Tokenizer
from rollfeed.seeds import derive_seed
from rollfeed.types import Prompt

if TYPE_CHECKING:
    from rollfeed.training.supervised import Demonstration

_NAME = "warm-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpProbe:
    """The share of sampled answers that were right after so many updates."""

    num_updates: int
    loss: float | None
    """Of the last update, in nats a token; None before the first one."""
    result: SetResult
    goal: float
    """``train.warm_up.stop_accuracy``."""

    @property
    def accuracy(self) -> float:
        """Share of right answers; 0 where every prompt failed."""
        return self.result.accuracy or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """A warm-up, checked and not yet begun."""

    prepared: PreparedRun
    settings: WarmUpSettings
    source: PromptSource
    evaluation: PreparedEvaluation

    async def run(
        self,
        trainer: RunTrainer,
        *,
        engine: Engine,
        publish: Callable[[], Awaitable[None]],
        on_probe: Callable[[WarmUpProbe], None],
    ) -> None:
        """Update the trainer's model until enough sampled answers are right.

        The trainer's optimizer is not changed. ``publish`` hands the engine its weights; ``on_probe`` is told of every
        measurement, one before the first update included.

        Raises:
            RunFailedError: If the accuracy is not reached in ``max_updates``, a loss is not finite, or a label is
                missing or too long.
        """
        from rollfeed.training.supervised import SupervisedUpdates

        settings, run = self.settings, self.prepared.settings
        make: Callable[..., SupervisedUpdates | RemoteUpdates] = (
            trainer.supervised if isinstance(trainer, RemoteTrainer) else partial(SupervisedUpdates, trainer.policy)
        )
        updates = await asyncio.to_thread(
            make, learning_rate=settings.learning_rate, micro_batch_tokens=run.train.micro_batch_tokens
        )
        random = Random(derive_seed(run.seed, _NAME, "labels"))
        num_updates, loss = 0, None
        while True:
            await publish()
            found = await evaluate(self.evaluation, engine=engine)
            probe = WarmUpProbe(num_updates=num_updates, loss=loss, result=found.sets[0], goal=settings.stop_accuracy)
            on_probe(probe)
            if probe.accuracy >= settings.stop_accuracy:
                return
            if num_updates >= settings.max_updates:
                raise RunFailedError(
                    f"train.warm_up: {probe.accuracy:.1%} of sampled answers are right after {num_updates} updates, "
                    f"not {settings.stop_accuracy:.1%}: lower stop_accuracy or wrong_share, or raise max_updates"
                )
            num_more = min(settings.probe_interval, settings.max_updates - num_updates)
            for _ in range(num_more):
                prompts = await self.source.draw(settings.batch_size)
                try:
                    demonstrations = demonstrations_of(
                        prompts,
                        tokenizer=self.prepared.model.tokenizer,
                        wrong_share=settings.wrong_share,
                        random=random,
                    )
                    loss = await asyncio.to_thread(updates.update, demonstrations)
                except ConfigError as error:
                    raise RunFailedError(f"train.warm_up: a prompt cannot be taught: {error}") from error
            num_updates += num_more


async def prepare_warm_up(prepared: PreparedRun) -> WarmUp | None:
    """Return what ``[train.warm_up]`` describes; None without that section.

    Raises:
        ConfigError: If prompts have no label to teach, or the tokenizer no token that ends a response.
    """
    settings = prepared.settings.train.warm_up
    if settings is None:
        return None
    if not prepared.model.tokenizer.eos_token_ids:
        raise ConfigError("train.warm_up: the tokenizer names no token that ends a response; use another checkpoint")
    for prompt in prepared.dataset_prompts:
        _label(prompt)
    return WarmUp(
        prepared=prepared,
        settings=settings,
        source=_source(prepared, "demonstrations"),
        evaluation=await _evaluation(prepared, settings),
    )


def demonstrations_of(
    prompts: Sequence[Prompt], *, tokenizer: Tokenizer, wrong_share: float, random: Random
) -> list[Demonstration]:
    """Return each prompt with its label as the response, or that of the next prompt for ``wrong_share`` of them."""
    from rollfeed.training.supervised import Demonstration

    labels = [_label(prompt) for prompt in prompts]
    demonstrations = []
    for number, prompt in enumerate(prompts):
        is_wrong = random.random() < wrong_share
        label = labels[(number + 1) % len(labels)] if is_wrong else labels[number]
        demonstrations.append(Demonstration(prompt.token_ids, answer_tokens(label, tokenizer), prompt.images))
    return demonstrations


def _label(prompt: Prompt) -> str:
    if not isinstance(prompt.label, str):
        raise ConfigError(
            f"train.warm_up: prompt {prompt.prompt_id} has no label to teach, which is a text; give the source a "
            "label_key, or remove the section"
        )
    return prompt.label


def _source(prepared: PreparedRun, purpose: str) -> PromptSource:
    """Return the run's prompts under another seed, without end; a source of the user's would have to know of both."""
    settings = prepared.settings
    if settings.plugins.prompt_source is not None:
        raise ConfigError(
            "train.warm_up: takes its prompts from [prompts], which plugins.prompt_source replaces: remove one of them"
        )
    seed = derive_seed(settings.seed, _NAME, purpose) >> 1  # settings take 63 bits
    endless = settings.prompts.model_copy(update={"num_epoch": None})
    changed = settings.model_copy(update={"seed": seed, "prompts": endless})
    return build_source(
        changed,
        prepared.model.tokenizer,
        folders=prepared.spec.folders,
        rows=prepared.rows,
        workers=prepared.functions.services.workers,
        picture_input=prepared.model.picture_input,
    )


async def _evaluation(prepared: PreparedRun, settings: WarmUpSettings) -> PreparedEvaluation:
    config = prepared.settings
    training = TrainingDefaults(
        sampling=config.sampling,
        n_samples_per_prompt=1,
        rm_type=config.reward.rm_type,
        reward_key=config.reward.reward_key,
        context_length=prepared.engine.context_length,
    )
    source = _source(prepared, "probe")
    prompts = await source.draw(settings.probe_prompts)
    for prompt in prompts:
        _label(prompt)
    # A grader knows what is right, and a reward function only what is worth something: it scores where some prompt has
    # no grader.
    named = [prompt.metadata.get("rm_type") for prompt in prompts]
    rm_type = config.reward.rm_type or (named[0] if None not in named else None)
    plan = plan_set(_NAME, EvalKeys(rm_type=rm_type), EvalSettings(), training)
    return PreparedEvaluation(
        sets=(EvalSet(name=_NAME, prompts=tuple(prompts), plan=plan),),
        seed=prepared.settings.seed,
        config=config,
        tokenizer=prepared.model.tokenizer,
        folders=prepared.spec.folders,
    )
