"""Trajectories in the Agent Trajectory Interchange Format (ATIF) of Harbor, from samples and back.

A step of the agent has the ids that were sent, those that were sampled, and their logprobs: samples come back as they
were. Where these are missing, a trajectory is a conversation to be learned from.

Source: ATIF-v1.7, as in ``harbor.models.trajectories``.

Axes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.true_runs import Run, runs_of
from rollfeed.conversations.learned import STEP_LOSS_MASK
from rollfeed.protocols import Tokenizer
from rollfeed.types import Prompt, Sample, SampleStatus
from rollfeed.types.text import text_of

VERSION = "ATIF-v1.7"
_OURS = "rollfeed"
_OF_TOKENS = ("token_ids", "response_length", "loss_mask", "logprobs")
_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}

Trajectory = Mapping[str, Any]


def trajectory_of(
    sample: Sample, *, prompt: Prompt | None, tokenizer: Tokenizer, model_name: str, version: str, session_id: str
) -> dict[str, Any]:
    """Return a sample as a trajectory.

    What is in a sample beside tokens stands in ``extra``; without a prompt, whose messages come first, they are one
    text. Samples of one rollout share a ``session_id``.
    """
    steps: list[dict[str, Any]] = list(_told(prompt)) if prompt is not None and prompt.messages else []
    if not steps:
        context = tokenizer.decode(sample.token_ids[: sample.prompt_length], skip_special_tokens=False)
        steps = [{"source": "user", "message": context}]
    steps += _turns(sample, tokenizer)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    agent: dict[str, Any] = {"name": _OURS, "version": version, "model_name": model_name}
    if prompt is not None and prompt.tools:
        agent["tool_definitions"] = [dict(tool) for tool in prompt.tools]
    about = {name: value for name, value in sample.to_dict().items() if name not in _OF_TOKENS}
    ends = _runs(sample)
    rest = sample.response_token_ids[ends[-1].end if ends else 0 :].tolist()
    return {
        "schema_version": VERSION,
        "session_id": session_id,
        "trajectory_id": f"{session_id}-{sample.index}",
        "agent": agent,
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {_OURS: {**about, "prompt_length": sample.prompt_length, "behind": rest}},
    }


def samples_of(trajectory: Trajectory, *, index: int, rollout_id: int) -> list[Sample]:
    """Return the samples of a trajectory and of its sub-agents; none where a turn has no tokens or logprobs.

    Turns whose context goes on from the turn before are one sample; another context begins another one.

    ``index`` and ``rollout_id`` are those of the first sample, unless it is a sample's own trajectory.

    Raises:
        ValueError: If it is no trajectory, or its numbers do not fit; says where.
    """
    _check_trajectory(trajectory)
    told = _turns_told(trajectory)
    if told is None:
        return []
    own = (trajectory.get("extra") or {}).get(_OURS)
    chains: list[_Chain] = []
    for step in told:
        metrics = step["metrics"]
        sent = np.array(metrics["prompt_token_ids"], np.int32)
        if not chains or not chains[-1].goes_on(sent):
            chains.append(_Chain(sent if own is None else sent[: own["prompt_length"]]))
        chains[-1].append(sent, metrics, is_copied=bool(step.get("is_copied_context")))
    samples = []
    for number, chain in enumerate(chains):
        about = own if own is not None and len(chains) == 1 else None
        samples.append(chain.build(about, index=index + number, group_index=index, rollout_id=rollout_id))
    for sub_agent in trajectory.get("subagent_trajectories") or ():
        samples += samples_of(sub_agent, index=index + len(samples), rollout_id=rollout_id)
    return samples


def conversation_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return a row of a data set for ``rollout.mode = "sft"``: ``messages``, and ``tools`` where there are any.

    Turns that were copied from another trajectory are not learned.

    Raises:
        ValueError: If it is no trajectory; says where.
    """
    _check_trajectory(trajectory)
    messages: list[dict[str, Any]] = []
    for step in trajectory["steps"]:
        message: dict[str, Any] = {"role": _SOURCES[step["source"]], "content": text_of(step.get("message"))}
        calls = step.get("tool_calls") or ()
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        if step.get("reasoning_content"):
            message["reasoning_content"] = step["reasoning_content"]
        if step["source"] == "agent" and (step.get("is_copied_context") or step.get("llm_call_count") == 0):
            message[STEP_LOSS_MASK] = 0
        messages.append(message)
        for result in (step.get("observation") or {}).get("results") or ():
            call_id, content = result.get("source_call_id"), text_of(result.get("content"))
            is_answer = call_id is not None and bool(calls)
            messages.append(
                {"role": "tool", "content": content, "tool_call_id": call_id}
                if is_answer
                else {"role": "user", "content": content}
            )
    tools = trajectory["agent"].get("tool_definitions")
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _check_trajectory(trajectory: Trajectory) -> None:
    """Raise ValueError unless something is a trajectory of version 1; says what is wrong and where."""
    if not str(trajectory.get("schema_version")).startswith("ATIF-v1."):
        raise ValueError(f"schema_version {trajectory.get('schema_version')!r} is not ATIF-v1")
    if not isinstance(trajectory.get("agent"), Mapping):
        raise ValueError("no agent")
    steps = trajectory.get("steps")
    if not isinstance(steps, list) or not steps:
        raise ValueError("no steps")
    for number, step in enumerate(steps, 1):
        if not isinstance(step, Mapping) or step.get("step_id") != number or step.get("source") not in _SOURCES:
            raise ValueError(f"step {number}: needs step_id {number}, and source system, user or agent")


class _Chain:
    """A sample in the making."""

    def __init__(self, context_P: NDArray[np.int32]) -> None:
        self._num_prompt = len(context_P)
        self._ids, self._mask, self._logprobs = context_P.tolist(), list[float](), list[float]()

    def goes_on(self, sent: NDArray[np.int32]) -> bool:
        return bool(sent[: len(self._ids)].tolist() == self._ids)

    def append(self, sent: NDArray[np.int32], metrics: Mapping[str, Any], *, is_copied: bool) -> None:
        said, logprobs = metrics["completion_token_ids"], metrics["logprobs"]
        weights = (metrics.get("extra") or {}).get("loss_mask") or [float(not is_copied)] * len(said)
        if not len(said) == len(logprobs) == len(weights):
            raise ValueError(f"{len(said)} completion_token_ids, {len(logprobs)} logprobs, {len(weights)} weights")
        self.tell(sent[len(self._ids) :].tolist())
        self._ids += said
        self._mask += weights
        self._logprobs += logprobs

    def tell(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids
        self._mask += [0.0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)

    def build(self, about: Mapping[str, Any] | None, *, index: int, group_index: int, rollout_id: int) -> Sample:
        if about is not None:
            self.tell(about["behind"])
            fields = {name: value for name, value in about.items() if name not in ("behind", "prompt_length")}
        else:
            fields = {"status": SampleStatus.COMPLETED.value, "group_index": group_index, "index": index}
            fields |= {"rollout_id": rollout_id, "version_spans": [[0, len(self._mask), 0]] if self._mask else []}
        tokens = {"token_ids": self._ids, "loss_mask": self._mask, "logprobs": self._logprobs}
        return Sample.from_dict({**fields, **tokens, "response_length": len(self._mask)})


def _turns_told(trajectory: Trajectory) -> list[Mapping[str, Any]] | None:
    """Return the steps that a model has said; None where one of them has not its tokens."""
    said = [step for step in trajectory["steps"] if step["source"] == "agent" and step.get("llm_call_count") != 0]
    fresh = [step for step in said if not (step.get("is_copied_context") and not step.get("metrics"))]
    for step in fresh:
        metrics = step.get("metrics") or {}
        if step.get("llm_call_count") not in (None, 1) or any(
            metrics.get(name) is None for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
        ):
            return None
    return fresh or None


def _told(prompt: Prompt) -> Iterator[dict[str, Any]]:
    """Yield the messages that began a conversation as steps; results of tools stand with the turn before."""
    last: dict[str, Any] | None = None
    for message in prompt.messages or ():
        text = text_of(message.get("content"))
        if message["role"] == "tool" and last is not None:
            last.setdefault("observation", {"results": []})["results"].append({"content": text})
            continue
        source = {"assistant": "agent", "system": "system", "developer": "system"}.get(message["role"], "user")
        last = {"source": source, "message": text, **({"is_copied_context": True} if source == "agent" else {})}
        yield last


def _turns(sample: Sample, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the sampled turns of a sample; what the policy is told then is the observation of the turn."""
    runs, ids, first = _runs(sample), sample.token_ids, sample.prompt_length
    for number, (start, end) in enumerate(runs):
        behind = runs[number + 1].start if number + 1 < len(runs) else sample.response_length
        said = ids[first + start : first + end]
        weights = sample.loss_mask[start:end]
        metrics: dict[str, Any] = {
            "prompt_tokens": first + start,
            "completion_tokens": end - start,
            "prompt_token_ids": ids[: first + start].tolist(),
            "completion_token_ids": said.tolist(),
            "logprobs": sample.logprobs[start:end].tolist(),
        }
        if not (weights == 1.0).all():
            metrics["extra"] = {"loss_mask": weights.tolist()}
        step = {"source": "agent", "message": tokenizer.decode(said, skip_special_tokens=True), "metrics": metrics}
        if behind > end:
            told = tokenizer.decode(ids[first + end : first + behind], skip_special_tokens=False)
            step["observation"] = {"results": [{"content": told}]}
        yield {**step, "llm_call_count": 1}


def _runs(sample: Sample) -> list[Run]:
    """Return where response tokens have a weight or a logprob: what was sampled."""
    return runs_of((sample.loss_mask != 0.0) | (sample.logprobs != 0.0))


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function_name"], "arguments": call.get("arguments") or {}}
    return {"id": call["tool_call_id"], "type": "function", "function": function}
