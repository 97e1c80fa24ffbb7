"""slime's generating functions: through the run's engine, and the run's own scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollfeed.compat.slime_plugins.names.engine_calls import ask, default_params, reply, sampling_params
from rollfeed.compat.slime_plugins.names.forms import RolloutFnTrainOutput
from rollfeed.compat.slime_plugins.names.helpers import SlimeTokenizer, load_function
from rollfeed.compat.slime_plugins.names.rm_hub import async_rm, batched_async_rm
from rollfeed.compat.slime_plugins.shared_run import (
    SlimeUseError,
    Work,
    awaited,
    current,
    hooked,
    latest,
    leaves,
    told_of_evaluation,
)
from rollfeed.compat.slime_plugins.slime_paths import paths_of


class _OneState(type):
    """A run has one state."""

    def __call__(cls, args: Any) -> Any:
        """Return the run's state, for these arguments."""
        run = latest()
        if run.state is None:
            run.state = super().__call__(args)
            run.state.reset()
        return run.state if run.state.args is args else super().__call__(args, shared=run.state)


class GenerateState(metaclass=_OneState):
    """Shared by slime's functions: tokenizer, sampling, and what a step has submitted.

    Other arguments than those of the first call have a state of their own, whose sampling is theirs; what a step has
    submitted is the same.
    """

    processor = None

    def __init__(self, args: Any, *, shared: GenerateState | None = None) -> None:
        vars(self).update(_shared=shared or self, args=args)
        self.sampling_params = sampling_params(default_params(args, latest().params))

    def __getattr__(self, name: str) -> Any:
        shared = vars(self).get("_shared", self)
        if shared is self or name.startswith("__"):
            raise AttributeError(f"GenerateState has no {name!r}")
        return getattr(shared, name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self if name == "sampling_params" else self._shared)[name] = value

    @property
    def tokenizer(self) -> SlimeTokenizer:
        """The policy's tokenizer."""
        tokenizer = latest().tokenizer
        if tokenizer is None:
            raise SlimeUseError("GenerateState.tokenizer: the run has not begun")
        return SlimeTokenizer(tokenizer)

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Give the rank to ask: there is one."""
        yield self.dp_rank

    def reset(self) -> None:
        """Begin a step."""
        self.semaphore = asyncio.Semaphore(self.args.sglang_server_concurrency)  # of the loop of this step
        self.dp_rank = self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: Sequence[list[Any]]) -> None:
        """Start to generate and score groups."""
        for group in samples:
            work = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(work))
        self.remaining_batch_size += len(samples)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Answer a sample, or go on with what it has; returns it.

    Raises:
        ValueError: If it has been answered.
    """
    work, status = current("generate"), type(sample).Status
    if sample.status not in (status.PENDING, status.ABORTED):
        raise ValueError(f"generate: sample {sample.index} is {sample.status.value} already")
    budget = sampling_params["max_new_tokens"] - sample.response_length
    if budget <= 0:
        sample.status = status.TRUNCATED
        return sample
    images = (sample.multimodal_inputs or {}).get("images") or []
    payload = {"sampling_params": {**sampling_params, "max_new_tokens": budget}, "image_data": images}
    payload |= {"input_ids": sample.tokens} if sample.tokens else {"text": sample.prompt}
    is_resumed = sample.response_length > 0
    completion = await work.on_loop(ask(payload, work))
    answer = reply(completion)
    if not sample.tokens:
        request = work.request
        is_asked = request is not None and sample.prompt == request.prompt.text
        encoded = work.services.tokenizer.encode(sample.prompt, add_special_tokens=False)
        sample.tokens = (request.prompt.token_ids if request is not None and is_asked else encoded).tolist()
    pairs = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in pairs],
        log_probs=[value for value, _, _ in pairs],
        trainable=True,
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    if is_resumed:  # a character may be split between the two
        ids = sample.tokens[len(sample.tokens) - sample.response_length :]
        skip = bool(sampling_params.get("skip_special_tokens"))
        sample.response = work.services.tokenizer.decode(ids, skip_special_tokens=skip)
    return sample


def _is_as_in_run(work: Work, sample: Any, params: dict[str, Any], evaluation: bool) -> bool:
    """Whether the run would answer a sample, or those of a fork, in the way that a rollout function asks for."""
    own = sample[0] if isinstance(sample, list) else sample
    return (
        work.bridge is not None
        and not evaluation
        and params == sampling_params(default_params(work.run.args, work.run.params))
        and all(getattr(own, name, None) == path for name, path in paths_of(own.metadata).items())
    )


async def generate_and_rm(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Answer a sample and score it, unless it is finished or the step has been aborted.

    In a rollout function, one that the run has drawn goes the way of all its samples, with its group.
    """
    status, state, work = type(sample).Status, GenerateState(args), current("generate_and_rm")
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (status.COMPLETED, status.TRUNCATED):
        return sample
    if not state.aborted and _is_as_in_run(work, sample, sampling_params, evaluation):
        return await work.bridge.answer_sample(sample)
    async with state.semaphore:
        if state.aborted:
            sample.status = status.ABORTED
            return sample
        path = sample.generate_function_path or args.custom_generate_function_path
        function = generate if path is None else load_function(path)
        made = await function(args, sample, sampling_params, **told_of_evaluation(function, evaluation))
    made = await hooked(made, args, load_function, evaluation=evaluation, rollout_id=work.step)
    if not args.group_rm and not any(each.status is status.ABORTED for each in leaves([made])):
        for each in leaves([made]):
            if each.reward is None:
                each.reward = await _score(args, each)
    return made


async def _score(args: Any, sample: Any) -> Any:
    """Return a sample's reward, by its own function, the run's, or its ``rm_type``."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path is None:
        return await async_rm(args, sample)
    if sample.custom_rm_path is None and latest().scores_lists:
        return (await awaited(load_function(path)(args, [sample])))[0]
    return await awaited(load_function(path)(args, sample))


async def generate_and_rm_group(
    args: Any, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Answer a group and score it; one that was drawn in the step goes the way of all groups of the run."""
    work, state = current("generate_and_rm_group"), GenerateState(args)
    if state.aborted:
        return group
    if all(_is_as_in_run(work, each, sampling_params, evaluation) for each in group):
        return await work.bridge.answer(group)
    made = await asyncio.gather(*(generate_and_rm(args, each, dict(sampling_params), evaluation) for each in group))
    if args.group_rm and not state.aborted:
        path = args.custom_rm_path
        rewards = await (batched_async_rm if path is None else load_function(path))(args, made)
        for sample, reward in zip(made, rewards, strict=True):
            sample.reward = reward
    return made


async def abort(args: Any, rollout_id: int) -> list[Any]:
    """End all that the step has submitted; returns unfinished groups where their tokens are kept."""
    work, state = current("abort"), GenerateState(args)
    state.aborted = True
    await work.bridge.abort()
    done = await asyncio.gather(*state.pendings, return_exceptions=True)
    state.pendings = set()
    groups = [group for group in done if isinstance(group, list)]
    for sample in (sample for group in groups for sample in group if not isinstance(sample, list)):
        if sample.response and "start_rollout_id" not in sample.metadata:
            sample.metadata["start_rollout_id"] = rollout_id
    return groups if args.partial_rollout else []


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[Any]]:
    """Make a step with the run's own scheduler; what it leaves goes back by itself."""
    del args, rollout_id, data_source
    groups = await current("generate_rollout").bridge.make_step()
    return RolloutFnTrainOutput(samples=groups), []


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Make a step with the run's own scheduler.

    Raises:
        SlimeUseError: If it is to evaluate.
    """
    if evaluation:
        eval_rollout(args, rollout_id)
    work = current("generate_rollout")
    future = asyncio.run_coroutine_threadsafe(work.bridge.make_step(), work.loop)
    del data_source
    return RolloutFnTrainOutput(samples=future.result())


def generate_abortable_samples(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Make a step as :func:`generate_rollout`; returns the groups, and those that were aborted."""
    return generate_rollout(args, rollout_id, data_source, evaluation).samples, []


def eval_rollout(args: Any, rollout_id: int) -> Any:
    """Refuse: evaluation is no part of a rollout function here."""
    del args, rollout_id
    raise SlimeUseError("eval_rollout: evaluation is done by [eval], not by rollout functions: remove the call")
