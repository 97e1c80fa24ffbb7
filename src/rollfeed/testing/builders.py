"""Prompts, samples and groups for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rollfeed.protocols import RolloutRequest
from rollfeed.testing.prompts import CharTokenizer
from rollfeed.types import Group, Prompt, Reward, Rollout, Sample, SampleStatus, SamplingParams, Verdict, VersionSpan


def make_prompt(text: str = "2 + 2 =", *, label: Any = "4", **changes: Any) -> Prompt:
    """Return a prompt tokenised a character at a time; ``changes`` are further fields."""
    ids = CharTokenizer().encode(text, add_special_tokens=False)
    fields = {"prompt_id": "made/0", "source": "made", "text": text, "token_ids": ids, "label": label}
    return Prompt(**{**fields, **changes})


def make_request(prompt: Prompt, *, max_new_tokens: int, max_context_length: int, **changes: Any) -> RolloutRequest:
    """Return the request of the first rollout of all, with seed 7; ``changes`` are fields that are otherwise."""
    fields = {
        "params": SamplingParams(max_new_tokens=max_new_tokens, seed=7),
        "group_index": 0,
        "index": 0,
        "rollout_id": 0,
        "step": 0,
        "max_context_length": max_context_length,
    }
    return RolloutRequest(prompt=prompt, **{**fields, **changes})


def sample_of(prompt_ids: ArrayLike, response_ids: ArrayLike, **changes: Any) -> Sample:
    """Return a completed sample of group 0: its tokens are all trained on, and of policy version 0.

    Token ids are ``(P,)`` and ``(R,)``; ``changes`` are fields that are otherwise.
    """
    prompt_P, response_R = np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)
    length = len(response_R)
    fields = {
        "token_ids": np.concatenate([prompt_P, response_R]),
        "response_length": length,
        "loss_mask": np.ones(length, np.float32),
        "logprobs": np.full(length, -1.0, np.float32),
        "version_spans": (VersionSpan(0, length, 0),) if length else (),
        "status": SampleStatus.COMPLETED,
        "group_index": 0,
        "index": 0,
        "rollout_id": 0,
    }
    return Sample(**{**fields, **changes})


def make_sample(
    response: str = "4", *, reward: Reward | None = 1.0, member: int = 0, prompt: Prompt | None = None, **changes: Any
) -> Sample:
    """Return a sample of a prompt, tokenised a character at a time; ``changes`` are fields that are otherwise."""
    prompt = prompt or make_prompt()
    ids = CharTokenizer().encode(response, add_special_tokens=False)
    fields = {"index": member, "rollout_id": member, "response": response, "label": prompt.label, "reward": reward}
    return sample_of(prompt.token_ids, ids, **{**fields, **changes})


def make_group(rewards: Sequence[Reward], *, group_index: int = 0, prompt: Prompt | None = None) -> Group:
    """Return a scored group with one rollout a reward."""
    prompt = prompt or make_prompt()
    first = group_index * len(rewards)
    samples = [
        make_sample(str(member), reward=reward, member=first + member, prompt=prompt, group_index=group_index)
        for member, reward in enumerate(rewards)
    ]
    return group_of(samples, prompt=prompt)


def group_of(samples: Sequence[Sample], *, prompt: Prompt) -> Group:
    """Return the group of samples that are a rollout each, scored by their rewards."""
    rollouts = tuple(Rollout(rollout_id=s.rollout_id, samples=(s,), verdict=Verdict(reward=s.reward)) for s in samples)
    return Group(group_index=samples[0].group_index, prompt=prompt, rollouts=rollouts)
