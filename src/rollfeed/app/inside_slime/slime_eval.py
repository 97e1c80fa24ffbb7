"""Evaluations of a slime or miles process."""

from __future__ import annotations

import asyncio
import copy
import importlib
from collections import ChainMap
from dataclasses import replace
from statistics import fmean
from typing import Any

from rollfeed.app.inside_slime.slime_answering import SlimeAnswering
from rollfeed.app.inside_slime.slime_groups import SlimeGroups
from rollfeed.app.inside_slime.slime_job import GENERATE, SlimeJob, SlimeWork, texts
from rollfeed.app.inside_slime.slime_numbers import named, pass_rates, reward_of, sample_numbers
from rollfeed.base.waiting import all_at_once
from rollfeed.compat.slime_plugins.shared_run import leaves
from rollfeed.config import RolloutMode
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.pipeline.groups import FailureBudget
from rollfeed.protocols import RunningGroup
from rollfeed.types import Group, SamplingParams

_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_new_tokens",
    "repetition_penalty",
    "skip_special_tokens",
    "no_stop_trim",
)
_DATASETS: dict[tuple[Any, ...], Any] = {}
"""Data sets that have been read, for later evaluations."""


async def evaluate(work: SlimeWork, job: SlimeJob, rollout_id: int) -> Any:
    """Answer all sets of ``args.eval_datasets`` at once, and return as the package's functions do.

    Raises:
        ConfigError: If there is no set.
        RunFailedError: If too many answers fail, or all of a set.
    """
    sets = getattr(job.args, "eval_datasets", None)
    if not sets:
        raise ConfigError("--eval-prompt-data, --eval-config: there is no data set to evaluate on")
    ended = await all_at_once(_evaluate_set(work, job, each, rollout_id) for each in sets)
    data = {each.name: found for each, (found, _) in zip(sets, ended, strict=True)}
    return work.output("RolloutFnEvalOutput", data, dict(ChainMap(*(numbers for _, numbers in ended))))


async def _evaluate_set(
    work: SlimeWork, job: SlimeJob, asked: Any, rollout_id: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return a set's rewards, samples and whether they were cut, prompt by prompt; and its numbers."""
    size = asked.n_samples_per_eval_prompt or 1
    settings = job.config.rollout.model_copy(update={"n_samples_per_prompt": size, "mode": RolloutMode.SYNC})
    length = getattr(job.args, "eval_max_context_len", None) or job.config.sampling.rollout_max_context_len
    sampling = job.config.sampling.model_copy(update={"rollout_max_context_len": length})
    config = job.config.model_copy(update={"rollout": settings, "sampling": sampling})
    asked_samples = await asyncio.to_thread(_samples, work, job, asked, size)
    groups = SlimeGroups(None, [], size=size, tokenizer=work.tokenizer, is_single_turn=GENERATE not in job.functions)
    answering = SlimeAnswering(work, job, groups, rollout_id=rollout_id, evaluation=True)
    failures = FailureBudget(settings)
    runner = answering.runner(config, failures, params=_params(job, asked))
    entered = [Group(number, groups.enter(samples)) for number, samples in enumerate(asked_samples)]
    ended = await all_at_once(
        runner.run(RunningGroup.of(each, n_samples_per_prompt=size, policy_version=0), step=0) for each in entered
    )
    failures.report()
    made = [groups.drawn[each.group_index].made for each in ended if each.is_finished]
    if not made:
        cause = ended[0].error if ended else "it is empty"
        raise RunFailedError(f"eval set {asked.name}: no prompt was answered; {cause}")
    samples, key, place = [leaf for group in made for leaf in leaves(group)], answering.reward_key, f"eval/{asked.name}"
    rewards, is_cut = [reward_of(each, key) for each in samples], [each.status.value == "truncated" for each in samples]
    numbers = {
        place: fmean(rewards),
        f"{place}-truncated_ratio": fmean(is_cut),
        **named(f"{place}/", sample_numbers(job.args, samples, reward_key=key)),
        **named(f"{place}-", pass_rates(made, reward_key=key)),
    }
    return {"rewards": rewards, "truncated": is_cut, "samples": samples}, numbers


def _params(job: SlimeJob, asked: Any) -> SamplingParams:
    """Return a set's sampling, training's where it says nothing."""
    given = {name: getattr(asked, name, None) for name in _PARAMS}
    if given["min_new_tokens"] is None:
        given["min_new_tokens"] = getattr(job.args, "eval_min_new_tokens", None)
    given["max_new_tokens"] = getattr(asked, "max_response_len", None)
    for name in ("stop", "stop_token_ids"):
        value = getattr(asked, name, None)
        given[name] = None if value is None else texts(value)
    return replace(job.config.sampling.params, **{name: value for name, value in given.items() if value is not None})


def _samples(work: SlimeWork, job: SlimeJob, asked: Any, size: int) -> list[list[Any]]:
    """Return a set's samples, ``size`` of each prompt, as slime makes them."""
    groups: list[list[Any]] = []
    for number, prompt in enumerate(_dataset(work, job, asked).samples):
        groups.append([copy.deepcopy(prompt) for _ in range(size)])
        for member, sample in enumerate(groups[-1]):
            sample.group_index, sample.index = number, number * size + member
            sample.metadata = asked.inject_metadata(sample.metadata)
            sample.custom_rm_path = getattr(asked, "custom_rm_path", None)
            sample.generate_function_path = getattr(asked, "custom_generate_function_path", None)
    return groups


def _dataset(work: SlimeWork, job: SlimeJob, asked: Any) -> Any:
    args, options = job.args, dict[str, Any]()
    for name in ("apply_chat_template", "apply_chat_template_kwargs", "multimodal_keys"):
        value = getattr(asked, name, None)
        options[name] = getattr(args, name, None) if value is None else value
    key = (*asked.cache_key, args.hf_checkpoint, repr(options))
    if key not in _DATASETS:
        load = importlib.import_module(f"{work.package}.utils.processing_utils")
        read = importlib.import_module(f"{work.package}.utils.data").Dataset
        _DATASETS[key] = read(
            asked.path,
            tokenizer=load.load_tokenizer(args.hf_checkpoint, trust_remote_code=True),
            processor=load.load_processor(args.hf_checkpoint, trust_remote_code=True),
            max_length=getattr(args, "eval_max_prompt_len", None),
            prompt_key=asked.input_key,
            label_key=asked.label_key,
            metadata_key=asked.metadata_key,
            tool_key=asked.tool_key,
            **options,
        )
    return _DATASETS[key]
