"""Scores the finished rollouts of a prompt, and single responses.

Invariants: one verdict a rollout, in order; a call that failed, timed out or returned nonsense is a
TIMEOUT or ERROR verdict, never a reward of 0; a rollout that carries a reward keeps it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollfeed.answers import without_end_token
from rollfeed.config.mixture import MIXTURE_RM_TYPE, MixturePartSettings
from rollfeed.errors import ConfigError, suggestion
from rollfeed.faults import attributed
from rollfeed.protocols import BatchedRewardFn, Grader, GroupRewardFn, RewardFn, Workers
from rollfeed.rewards.by_name import missing_argument
from rollfeed.rewards.calls import Caller, GroupGrader, OfSamples, OwnPace, blamed, failure
from rollfeed.rewards.graders.mixed import mix, part_problem
from rollfeed.rewards.isolation import InProcessWorkers
from rollfeed.rewards.registry import BOXED_PREFIX, SEED_KEY, BuiltinGrader, boxed, grader_name
from rollfeed.rewards.results import REWARD_KEY, carried_verdict, keyed_verdict, not_a_list, to_verdict, unfinished
from rollfeed.rewards.rows import row_prompt, row_rollout, row_sample
from rollfeed.seeds import derive_seed
from rollfeed.types import Correct, Outcome, Prompt, Rollout, Sample, Verdict

PROMPT_KEY = "prompt_text"
"""Entry of the metadata with the rendered prompt; the hub sets it for graders."""
MESSAGES_KEY = "prompt_messages"
"""Entry with the messages that the prompt was rendered from, where there are any."""
_REWARD_FN = "reward_fn"


class RewardHub:
    """Chooses who scores.

    That is the function of ``named_reward_fns`` that the metadata of the sample, or else of the prompt, names under
    ``reward_fn``; else the custom function; else the grader of the prompt's ``rm_type``, else of ``rm_type``.
    ``boxed_<rm_type>`` grades the content of the last box. A ``reward_key`` in the prompt's metadata goes before
    ``reward_key``.

    A prompt whose ``rm_type`` is one of ``own_verifiers`` is not for the custom function: its grader goes before.

    Any of these that is an :class:`OwnPace` is awaited without a deadline.

    ``rm_type`` ``mixture`` scores by all of ``mixture``. What is scored without a word on whether it is right, and has
    a label, is looked at by the grader ``verifier`` for that; what the verifier cannot grade stays without.

    Args:
        graders: By ``rm_type``; the door for further graders.
        rm_type: Grader for prompts whose metadata names none.
        named_reward_fns: Functions that prompts and samples may ask for by name.
        own_verifiers: Each an ``rm_type`` of prompts that bring their verifier.
        reward_fn: Scores a rollout by its last sample.
        batched_reward_fn: Scores all rollouts of a prompt in one call.
        group_reward_fn: As ``batched_reward_fn``, and is handed rollouts that carry a reward as well.
        reward_key: Which entry of a reward dictionary counts.
        mixture: Parts of ``rm_type`` ``mixture``.
        verifier: A grader of ``graders`` that says which answers are right; it changes no reward.
        seed: Of the run; with it and what a sample is, grader ``random`` is decided.
        timeout_seconds: Deadline of every single call of a function or a further grader.
        concurrency: Calls of async functions at once; by default any number.
        workers: Make the calls of built-in graders that must be killable; by default this process makes them.
        worker_timeout_seconds: Deadline of each of those, from its turn.

    Raises:
        ConfigError: If an ``rm_type`` or a function is unknown, or more than one function is given.
    """

    def __init__(
        self,
        *,
        graders: Mapping[str, Grader | OwnPace],
        rm_type: str | None = None,
        own_verifiers: Collection[str] = (),
        reward_fn: RewardFn | None = None,
        batched_reward_fn: BatchedRewardFn | None = None,
        group_reward_fn: GroupRewardFn | None = None,
        named_reward_fns: Mapping[str, RewardFn] | None = None,
        reward_key: str | None = None,
        mixture: Sequence[MixturePartSettings] = (),
        verifier: str | None = None,
        seed: int = 0,
        timeout_seconds: float,
        concurrency: int | None = None,
        workers: Workers | None = None,
        worker_timeout_seconds: float = 5.0,
    ) -> None:
        if sum(function is not None for function in (reward_fn, batched_reward_fn, group_reward_fn)) > 1:
            raise ConfigError("reward_fn, batched_reward_fn and group_reward_fn all score rollouts: set one of them")
        self._graders = dict(graders)
        if mixture:
            self._graders[MIXTURE_RM_TYPE] = OfSamples(self._mix)
        if rm_type is not None and self._find_grader(rm_type) is None:
            raise ConfigError(self.problem(rm_type))
        self._rm_type = rm_type
        self._own_verifiers = frozenset(own_verifiers)
        self._reward_fn = reward_fn
        self._batched_reward_fn = batched_reward_fn
        self._group_reward_fn = group_reward_fn
        self._named_reward_fns = {} if named_reward_fns is None else named_reward_fns
        self._mixture, self._verifier = tuple(mixture), verifier
        if problem := part_problem(
            self._mixture, self._verifier, functions=self._named_reward_fns, graders=self._graders, of=self.problem
        ):
            raise ConfigError(problem)
        self._reward_key = reward_key
        self._seed = seed
        self._workers = workers or InProcessWorkers()
        self._worker_timeout_seconds = worker_timeout_seconds
        self._caller = Caller(timeout_seconds=timeout_seconds, concurrency=concurrency)

    def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        if self._brings_verifier(prompt):
            return True
        if rollout.samples and _named_function(rollout.samples[-1], prompt) is not None:
            return True
        return self._reward_fn is not None if self.has_function else self._group_grader(prompt) is None

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        """Return one verdict a rollout, in order.

        An aborted or failed rollout gets an ERROR verdict; with a batched or group function so do the others of its
        prompt, and the function is not called.
        """
        verdicts = [carried_verdict(rollout, prompt, self._reward_key) for rollout in rollouts]
        missing = [position for position, verdict in enumerate(verdicts) if verdict is None]
        if missing:
            scored = await self._score_missing(rollouts, missing, prompt)
            if self._verifier is not None and prompt.label is not None:
                verified = [self._verified(verdict, rollouts[place], prompt) for place, verdict in scored.items()]
                scored = dict(zip(scored, await asyncio.gather(*verified), strict=True))
            verdicts = [scored.get(position, verdict) for position, verdict in enumerate(verdicts)]
        return [verdict for verdict in verdicts if verdict is not None]

    async def grade(
        self,
        response: Any,
        label: Any,
        *,
        rm_type: Any = None,
        metadata: Any = None,
        reward_key: str | None = None,
        prompt: Any = None,
    ) -> Verdict:
        """Grade one response by the ``rm_type`` of the metadata, which may be JSON text, or ``rm_type``, or the hub's.

        A function goes before them, as it does for rollouts. Whatever is wrong with the arguments is an ERROR verdict.
        """
        try:
            read = json.loads(metadata) if isinstance(metadata, str) else {} if metadata is None else metadata
        except (ValueError, RecursionError) as error:
            return Verdict.failed(f"metadata is no JSON: {error}")
        if not isinstance(read, Mapping):
            return Verdict.failed(f"metadata is {read!r:.80}; it must be a mapping")
        if self.has_function or read.get(_REWARD_FN) is not None:
            return await self._score_row(response, label, {"rm_type": rm_type, REWARD_KEY: reward_key}, read, prompt)
        key = reward_key or self._reward_key
        return await self._grade(response, label, read, rm_type=rm_type, prompt=prompt, reward_key=key)

    def function_problem(self, prompt: Prompt) -> str | None:
        """Return why the function that scores a prompt cannot be called: it asks for what the prompt has not."""
        name = prompt.metadata.get(_REWARD_FN)
        functions = {
            "plugins.reward": self._reward_fn,
            "plugins.batched_reward": self._batched_reward_fn,
            "plugins.group_reward": self._group_reward_fn,
        }
        if name is not None:
            functions = {f"reward.functions.{name}": self._named_reward_fns.get(name)}
        for setting, function in functions.items():
            users = function.calls if isinstance(function, OwnPace) else function
            if (problem := missing_argument(users, prompt)) is not None:
                return attributed(setting, users, problem)
        return None

    @property
    def has_function(self) -> bool:
        """Whether a function scores what names nothing else."""
        return any((self._reward_fn, self._batched_reward_fn, self._group_reward_fn))

    async def _score_row(
        self, response: Any, label: Any, options: Mapping[str, Any], metadata: Mapping[str, Any], prompt: Any
    ) -> Verdict:
        if not isinstance(response, str):
            return Verdict.failed(f"the response is {response!r:.80}; it must be a text")
        known = {**{name: value for name, value in options.items() if value is not None}, **metadata}
        (verdict,) = await self.score([row_rollout(response, label, known)], row_prompt(prompt, label, known))
        return verdict

    def grader_of(self, metadata: Mapping[str, Any], rm_type: Any) -> Any:
        """Return the ``rm_type`` by which :meth:`grade` would go, or None where a function of the user's scores."""
        named = metadata.get("rm_type") or rm_type
        if metadata.get(_REWARD_FN) is not None or (self.has_function and str(named) not in self._own_verifiers):
            return None
        return named or self._rm_type

    def has_scorer(self, prompt: Prompt) -> bool:
        """Whether a function or a grader is named that scores answers to a prompt."""
        named = (prompt.metadata.get(name) for name in ("rm_type", _REWARD_FN))
        return self.has_function or self._rm_type is not None or any(each is not None for each in named)

    def problem(self, rm_type: Any) -> str | None:
        """Return why a response cannot be graded by ``rm_type``, or None; None takes the hub's own."""
        rm_type = self._rm_type if rm_type is None else rm_type
        if rm_type is None:
            return "no rm_type: name a grader in the metadata or in the settings"
        if isinstance(rm_type, str) and self._find_grader(rm_type) is not None:
            return None
        return f"rm_type = {rm_type!r:.80}: no such grader; {suggestion(str(rm_type), self._graders)}"

    async def _score_missing(
        self, rollouts: Sequence[Rollout], missing: Sequence[int], prompt: Prompt
    ) -> dict[int, Verdict]:
        alone = [position for position in missing if self.scores_alone(rollouts[position], prompt)]
        if len(alone) == len(rollouts) == 1:  # without a task, as there is a call for every rollout
            return {0: await self._score_one(rollouts[0], prompt)}
        together = [position for position in missing if position not in alone]
        async with asyncio.TaskGroup() as tasks:
            rest = tasks.create_task(self._score_rest(rollouts, together, prompt))
            running = [tasks.create_task(self._score_one(rollouts[position], prompt)) for position in alone]
        verdicts = [task.result() for task in running]
        return dict(zip(alone, verdicts, strict=True)) | dict(zip(together, rest.result(), strict=True))

    def _brings_verifier(self, prompt: Prompt) -> bool:
        return str(prompt.metadata.get("rm_type")) in self._own_verifiers

    async def _score_rest(
        self, rollouts: Sequence[Rollout], positions: Sequence[int], prompt: Prompt
    ) -> Sequence[Verdict]:
        """Score the rollouts at ``positions`` with the function that takes several."""
        if not positions:
            return []
        if (grader := self._group_grader(prompt)) is not None and not self.has_function:
            verdicts = await self._compare(grader, rollouts, prompt)
            return [verdicts[position] for position in positions]
        if self._group_reward_fn is not None:
            verdicts = await self._score_together(
                "plugins.group_reward", self._group_reward_fn, rollouts, prompt, prompt
            )
            return [verdicts[position] for position in positions]
        chosen, prompts = [rollouts[position] for position in positions], [prompt] * len(positions)
        return await self._score_together("plugins.batched_reward", self._batched_reward_fn, chosen, prompts, prompt)

    async def _score_one(self, rollout: Rollout, prompt: Prompt) -> Verdict:
        if not rollout.has_finished:
            return Verdict.failed(f"not scored: the rollout is {rollout.status.value}")
        sample = rollout.samples[-1]
        name = _named_function(sample, prompt)
        if name is not None and (not isinstance(name, str) or name not in self._named_reward_fns):
            return Verdict.failed(
                f"reward_fn {name!r:.80}: no such function; {suggestion(str(name), self._named_reward_fns)}"
            )
        configured = None if self._brings_verifier(prompt) else self._reward_fn
        function = configured if name is None else self._named_reward_fns[name]
        if function is not None:
            verdict = keyed_verdict(
                await self._caller.call(function, sample, prompt), prompt.metadata, self._reward_key
            )
            setting = "plugins.reward" if name is None else f"reward.functions.{name}"
            return blamed(verdict, setting=setting, function=function)
        return await self._grade_sample(sample, prompt, prompt.metadata, reward_key=self._reward_key)

    async def _grade_sample(
        self, sample: Sample, prompt: Prompt, metadata: Mapping[str, Any], *, reward_key: str | None
    ) -> Verdict:
        seed = derive_seed(self._seed, "reward", prompt.prompt_id, sample.group_index, sample.index)
        return await self._grade(
            sample.response,
            prompt.label,
            metadata,
            prompt=prompt,
            reward_key=reward_key,
            seed=seed,
            about=(sample, prompt),
        )

    async def _mix(self, sample: Sample, prompt: Prompt) -> Verdict:
        async def score(part: MixturePartSettings) -> Verdict:
            if part.function is not None:
                function = self._named_reward_fns[part.function]
                verdict = to_verdict(await self._caller.call(function, sample, prompt), reward_key=part.reward_key)
                return blamed(verdict, setting=f"reward.functions.{part.function}", function=function)
            metadata = {key: value for key, value in prompt.metadata.items() if key != REWARD_KEY}
            own = metadata | {"rm_type": part.rm_type}
            return await self._grade_sample(sample, prompt, own, reward_key=part.reward_key)

        return await mix(self._mixture, score)

    async def _verified(self, verdict: Verdict, rollout: Rollout, prompt: Prompt) -> Verdict:
        """Return the verdict with what the verifier says of the answer, where it says something."""
        if verdict.outcome is not Outcome.OK or verdict.correct is not Correct.UNDEFINED:
            return verdict
        metadata = {key: value for key, value in prompt.metadata.items() if key != REWARD_KEY}
        own = metadata | {"rm_type": self._verifier}
        found = await self._grade_sample(rollout.samples[-1], prompt, own, reward_key=None)
        return replace(verdict, correct=found.correct, extracted=verdict.extracted or found.extracted)

    async def _grade(
        self,
        response: Any,
        label: Any,
        metadata: Mapping[str, Any],
        *,
        rm_type: Any = None,
        prompt: Any,
        reward_key: str | None,
        seed: int | None = None,
        about: tuple[Sample, Prompt] | None = None,
    ) -> Verdict:
        """Grade a response by the ``rm_type`` of the metadata, the given one or the hub's."""
        own = metadata.get("rm_type")
        rm_type = (rm_type or self._rm_type) if own is None else own
        if problem := self.problem(rm_type):
            return Verdict.failed(problem)
        if not isinstance(response, str):
            return Verdict.failed(f"the response is {response!r:.80}; it must be a text")
        known = _known(metadata, prompt=prompt, reward_key=reward_key)
        if seed is not None:
            known[SEED_KEY] = seed
        grader = self._find_grader(rm_type)
        assert grader is not None
        if isinstance(grader, OfSamples):
            result = await self._caller.call(grader, *(about or row_sample(response, label, known, prompt)))
        else:
            result = await self._call_grader(grader, without_end_token(response), label, known)
        return keyed_verdict(result, metadata, reward_key)

    async def _call_grader(
        self, grader: Grader | OwnPace, response: str, label: Any, metadata: Mapping[str, Any]
    ) -> Any:
        if not isinstance(grader, BuiltinGrader):
            return await self._caller.call(grader, response, label, metadata)
        try:
            begun = grader.grade(response, label, metadata)
            if isinstance(begun, Verdict):
                return begun
            path, deadline = begun.function_path, self._worker_timeout_seconds
            return begun.finish(await self._workers.call(path, begun.args, deadline_seconds=deadline, cached=True))
        except Exception as error:  # a grader that raises is at fault, never the response
            return failure(error)

    async def _score_together(
        self, setting: str, function: Any, rollouts: Sequence[Rollout], prompts: Prompt | list[Prompt], prompt: Prompt
    ) -> list[Verdict]:
        if (failed := unfinished(rollouts)) is not None:
            return [failed] * len(rollouts)
        results = await self._caller.call(function, [rollout.samples[-1] for rollout in rollouts], prompts)
        results = results.tolist() if isinstance(results, np.ndarray) and results.ndim == 1 else results
        if isinstance(results, Verdict) and results.outcome is not Outcome.OK:
            results = [results] * len(rollouts)
        elif not isinstance(results, Sequence) or isinstance(results, str | bytes) or len(results) != len(rollouts):
            results = [not_a_list(results, rollouts)] * len(rollouts)
        verdicts = [keyed_verdict(result, prompt.metadata, self._reward_key) for result in results]
        return [blamed(verdict, setting=setting, function=function) for verdict in verdicts]

    async def _compare(self, grader: GroupGrader, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        if (failed := unfinished(rollouts)) is not None:
            return [failed] * len(rollouts)
        known = _known(prompt.metadata, prompt=prompt, reward_key=self._reward_key)
        try:
            responses = [without_end_token(rollout.samples[-1].response) for rollout in rollouts]
            results = await grader.compare(responses, prompt.label, known)
        except Exception as error:  # a grader that raises is at fault, never the responses
            results = [failure(error)] * len(rollouts)
        return [keyed_verdict(result, prompt.metadata, self._reward_key) for result in results]

    def _group_grader(self, prompt: Prompt) -> GroupGrader | None:
        """Return what scores all responses to a prompt together, where its ``rm_type`` is such a grader."""
        own = prompt.metadata.get("rm_type")
        rm_type = self._rm_type if own is None else own
        found = self._graders.get(rm_type) if isinstance(rm_type, str) else None
        return found if isinstance(found, GroupGrader) else None

    def _find_grader(self, rm_type: str) -> Grader | OwnPace | None:
        grader = self._graders.get(rm_type)
        if grader is not None:
            return grader
        inner = self._graders.get(grader_name(rm_type))
        if isinstance(inner, OfSamples):  # which sees no text that a box could be cut from
            return None
        return boxed(inner) if inner is not None and rm_type.startswith(BOXED_PREFIX) else inner


def _known(metadata: Mapping[str, Any], *, prompt: Any, reward_key: str | None) -> dict[str, Any]:
    """Return the metadata with what graders are told besides; ``prompt`` may be the text or the messages of a row."""
    told = {PROMPT_KEY: prompt, REWARD_KEY: reward_key}
    if isinstance(prompt, Prompt):
        told |= {PROMPT_KEY: prompt.text, MESSAGES_KEY: prompt.messages}
    return {**{name: value for name, value in told.items() if value is not None}, **metadata}


def _named_function(sample: Sample, prompt: Prompt) -> Any:
    return sample.metadata.get(_REWARD_FN, prompt.metadata.get(_REWARD_FN))
