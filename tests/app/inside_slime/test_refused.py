"""Arguments that are not served or wrong: one error with the flag, before any server is asked."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.slime_caller import Source, arguments, eval_set

from rollfeed.compat.slime_rollout import generate_rollout
from rollfeed.errors import ConfigError, EngineError

NOWHERE = "http://127.0.0.1:9"


def judge(args: Namespace) -> float:
    return 0.0


async def late_filter(args: Namespace, samples: list[Any]) -> bool:
    return True


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"over_sampling_filter_path": "a.b"}, r"--over-sampling-filter-path a.b: .*--dynamic-sampling-filter-path"),
        ({"lora_rank": 8}, r"--lora-rank 8: requests name no adapter"),
        ({"rollout_top_p": 0.9}, r"--rollout-top-p 0.9: this slime trains with the tokens that were kept"),
        ({"multimodal_keys": {"image": "i"}}, r"--multimodal-keys: .*--custom-generate-function-path"),
        ({"sglang_router_ip": None}, r"--sglang-router-ip, --sglang-router-port: there is no router"),
        ({"rollout_batch_size": None}, r"--rollout-batch-size is not given"),
        ({"rollout_max_response_len": None}, r"--rollout-max-response-len is not given"),
        ({"rollout_batch_size": 0}, r"--rollout-batch-size 0: .*greater than or equal to 1"),
        ({"over_sampling_batch_size": 2}, r"over_sampling_batch_size = 2 is below rollout_batch_size = 3"),
        ({"rollout_temperature": -1.0}, r"--rollout-temperature -1.0: "),
        ({"custom_rm_path": "no_such.judge"}, r"--custom-rm-path = 'no_such:judge': .*no_such"),
        ({"custom_rm_path": f"{__name__}.judge"}, r"--custom-rm-path .*judge: too many .*\(args, sample\)"),
        ({"dynamic_sampling_filter_path": f"{__name__}.late_filter"}, r"is async, and slime calls it without await"),
        ({"rm_type": "mathh", "custom_rm_path": None}, r"rm_type = 'mathh': no such grader"),
    ],
)
def test_an_argument_that_is_not_served_is_named_before_anything_is_asked(
    checkpoint: Path, source: Source, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        generate_rollout(arguments(NOWHERE, checkpoint, rollout_max_context_len=300, **changes), 0, source)
    assert source.num_drawn == 0


def test_evaluations_need_a_set_and_score_each_answer(router: str, checkpoint: Path, tmp_path: Path) -> None:
    args = arguments(router, checkpoint, rollout_max_context_len=300)
    with pytest.raises(ConfigError, match="--eval-prompt-data, --eval-config: there is no data set"):
        generate_rollout(args, 0, None, evaluation=True)
    args.eval_datasets, args.group_rm = [eval_set(tmp_path / "a.jsonl")], True
    with pytest.raises(ConfigError, match="--group-rm: evaluations score each answer"):
        generate_rollout(args, 0, None, evaluation=True)


def test_the_length_of_texts_is_asked_of_the_checkpoint_and_then_of_the_user(checkpoint: Path, source: Source) -> None:
    with pytest.raises(ConfigError, match="--rollout-max-context-len: give it"):
        generate_rollout(arguments(NOWHERE, checkpoint), 0, source)


def test_a_router_that_is_none_is_said_after_the_checks(router: str, checkpoint: Path, source: Source) -> None:
    args = arguments(f"{router}", checkpoint, rollout_max_context_len=300)
    generate_rollout(args, 0, source)
    args.sglang_server_concurrency = 4  # other servers are connected to anew
    generate_rollout(args, 1, source)
    args.rollout_max_context_len = 10**7  # more than the servers take
    with pytest.raises(EngineError):
        generate_rollout(args, 2, source)
