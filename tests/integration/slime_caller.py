"""A caller as slime's rollout manager is one: a namespace of its arguments, a data source with a buffer, a set."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample

SIZE = 2
"""Samples of a group."""


class Source:
    """A data source as a slime user writes one: what comes back goes first."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.asked: list[int] = []
        self.buffer: list[list[Any]] = []
        self.returned: list[list[Any]] = []

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        self.asked.append(num_samples)
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(groups) < num_samples:
            number, self.num_drawn = self.num_drawn, self.num_drawn + 1
            prompt = f"Question {number}: what is {number} + 1?"
            groups.append(
                [
                    SlimeSample(group_index=number, index=number * SIZE + member, prompt=prompt, label=str(number + 1))
                    for member in range(SIZE)
                ]
            )
        return groups

    def add_samples(self, groups: list[list[Any]]) -> None:
        self.buffer += groups
        self.returned += [[(list(each.tokens), each.response_length) for each in group] for group in groups]


async def length_reward(args: Namespace, sample: Any) -> dict[str, float]:
    return {args.reward_key: float(sample.response_length % 2), "length": float(sample.response_length)}


class EvalSet(SimpleNamespace):
    """A set as ``args.eval_datasets`` has it."""

    cache_key = ("numbers",)

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        return {**(metadata or {}), "rm_type": self.rm_type}


def eval_set(path: Path, **changes: Any) -> EvalSet:
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values = {
        "name": "numbers",
        "path": str(path),
        "rm_type": "random",
        "input_key": "question",
        "label_key": "answer",
        "metadata_key": "metadata",
        "tool_key": None,
        "n_samples_per_eval_prompt": 2,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_response_len": 6,
    }
    return EvalSet(**{**values, **changes})


def arguments(router: str, checkpoint: Path, **changes: Any) -> Namespace:
    """Return what the actor has of slime's arguments, as far as rollouts go."""
    address = urlsplit(router)
    values = {
        "hf_checkpoint": str(checkpoint),
        "sglang_router_ip": address.hostname,
        "sglang_router_port": address.port,
        "sglang_server_concurrency": 8,
        "rollout_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
        "rollout_batch_size": 3,
        "n_samples_per_prompt": SIZE,
        "over_sampling_batch_size": 6,
        "rollout_max_response_len": 200,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 7,
        "rollout_global_dataset": True,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "rm_type": None,
        "group_rm": False,
        "custom_rm_path": f"{__name__}.length_reward",
        "custom_generate_function_path": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "reward_key": "odd",
        "eval_reward_key": None,
        "advantage_estimator": "grpo",
        "log_passrate": True,
        "eval_datasets": [],
    }
    return Namespace(**{**values, **changes})
