"""A step of a slime or miles process, made by the scheduler of rollfeed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rollfeed.app.inside_slime.slime_answering import SlimeAnswering
from rollfeed.app.inside_slime.slime_groups import SlimeGroup, SlimeGroups
from rollfeed.app.inside_slime.slime_job import GENERATE, PROCESS_ALL, SAMPLE_FILTER, SlimeJob, SlimeWork
from rollfeed.app.inside_slime.slime_numbers import named, pass_rates, reward_of, sample_numbers
from rollfeed.batch import AgeLimit
from rollfeed.buffer import Buffer, fifo
from rollfeed.compat.slime_plugins.shared_run import leaves
from rollfeed.config import RolloutMode, StalenessPolicy
from rollfeed.errors import ConfigError
from rollfeed.pipeline import Observers, Placement, Scheduler
from rollfeed.pipeline.collector import rare_collections
from rollfeed.pipeline.context import InFlight, StepContext
from rollfeed.pipeline.groups import FailureBudget
from rollfeed.pipeline.ledger import Ledger
from rollfeed.pipeline.supply import PromptSupply
from rollfeed.types import Dropped, Ending, LedgerCounts, Requeued, Surplus, Trained


async def make_step(work: SlimeWork, job: SlimeJob, rollout_id: int, data_source: Any) -> Any:
    """Return a step's groups as the package's rollout functions do.

    Raises:
        ConfigError: If the data source takes nothing back, and should.
        RunFailedError: If there is no batch; what was drawn waits for the next call, whatever is raised.
    """
    size, is_partial = job.config.rollout.n_samples_per_prompt, job.config.rollout.mode is RolloutMode.PARTIAL
    if is_partial and not hasattr(data_source, "add_samples"):
        raise ConfigError("--partial-rollout: the data source has no add_samples, which takes back what is unfinished")
    draw = getattr(data_source, "get_samples", data_source)  # in older loops a function
    groups = SlimeGroups(
        draw, work.waiting, size=size, tokenizer=work.tokenizer, is_single_turn=GENERATE not in job.functions
    )

    def ended(*kinds: type[Ending]) -> list[SlimeGroup]:
        found = [groups.drawn[each.group.group_index] for each in endings if isinstance(each, kinds)]
        return sorted(found, key=lambda group: group.order)

    try:
        endings, metrics = await _make_batch(work, job, groups, rollout_id)
        made = [group.made for group in ended(Trained)]
        if SAMPLE_FILTER in job.functions:
            job.functions[SAMPLE_FILTER](job.args, made)
        if PROCESS_ALL in job.functions:  # with the function that draws, as slime's own
            job.functions[PROCESS_ALL](job.args, [group.made for group in ended(Trained, Dropped)], draw)
        numbers = _numbers(job, made)
        left = ended(Requeued, Surplus)
        if not is_partial:
            work.waiting.extend(group.anew() for group in left)
        elif left:
            await asyncio.to_thread(data_source.add_samples, [group.begun(rollout_id=rollout_id) for group in left])
    except BaseException:
        work.waiting[:0] = [group.anew() for group in groups.drawn]
        raise
    return work.output("RolloutFnTrainOutput", made, metrics | numbers)


async def _make_batch(
    work: SlimeWork, job: SlimeJob, groups: SlimeGroups, rollout_id: int
) -> tuple[Sequence[Ending], dict[str, float]]:
    """Return where all groups of a step went, and how many went where."""
    settings, ledger = job.config.rollout, Ledger(LedgerCounts(), requeued=[], surplus=[])
    answering, failures = SlimeAnswering(work, job, groups, rollout_id=rollout_id), FailureBudget(settings)
    buffer = Buffer(fifo, n_samples_per_prompt=settings.n_samples_per_prompt, max_bytes=1)
    context = StepContext(
        step=rollout_id,
        rollout_batch_size=settings.rollout_batch_size,
        supply=PromptSupply(groups, ledger=ledger, buffer=buffer, placement=Placement(), state=None),
        ledger=ledger,
        runner=answering.runner(job.config, failures, params=job.config.sampling.params),
        in_flight=InFlight(),
        gate=answering.gate,
        group_filter=answering.decide,
        observer=Observers(),
        abort_grace_seconds=settings.abort_grace_seconds,
        is_wanted=True,
    )
    # Versions are the business of whoever gives weights to the servers.
    scheduler = Scheduler(settings=settings, age_rule=AgeLimit(max_staleness=None, policy=StalenessPolicy.REQUEUE))
    try:
        with rare_collections():
            endings = await scheduler(context)
    finally:
        await context.close()
        failures.report()
    context.take(ending.group for ending in endings)
    endings += [Requeued(running.rest(), "unfinished") for running in context.running.values()]
    for ending in endings:
        ledger.book(ending)
    return endings, ledger.step_metrics()


def _numbers(job: SlimeJob, made: Sequence[Sequence[Any]]) -> dict[str, float]:
    samples, key = [sample for group in made for sample in leaves(group)], job.config.reward.reward_key
    numbers = sample_numbers(job.args, samples, reward_key=key)
    own = {"raw_reward": fmean(reward_of(each, key) for each in samples), "truncated": numbers["truncated_ratio"]}
    rates = pass_rates(made, reward_key=key) if getattr(job.args, "log_passrate", False) else {}
    return {**named("rollout/", numbers | own), **named("passrate/", rates)}
