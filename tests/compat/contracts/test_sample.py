"""The record that plug-ins are handed: fields, methods, and the one way in which tokens are appended to it."""

from argparse import Namespace
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from rollfeed.compat.slime_plugins.names.slime_sample import Sample

DEFAULTS: dict[str, Any] = {
    "group_index": None,
    "index": None,
    "rollout_id": None,
    "prompt": "",
    "tokens": [],
    "multimodal_inputs": None,
    "multimodal_train_inputs": None,
    "multimodal_train_input_id": None,
    "apply_chat_template_kwargs": {},
    "response": "",
    "response_length": 0,
    "label": None,
    "reward": None,
    "loss_mask": None,
    "weight_versions": [],
    "rollout_log_probs": None,
    "rollout_top_p_token_ids": None,
    "rollout_top_p_token_offsets": None,
    "rollout_routed_experts": None,
    "remove_sample": False,
    "teacher_log_probs": None,
    "status": Sample.Status.PENDING,
    "metadata": {},
    "generate_function_path": None,
    "custom_rm_path": None,
    "train_metadata": None,
    "session_id": None,
    "non_generation_time": 0.0,
    "spec_info": Sample.SpecInfo(),
    "prefix_cache_info": Sample.PrefixCacheInfo(),
}
SPECULATIVE = {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2, "completion_tokens": 6}


def test_the_fields_and_their_defaults_are_those_of_the_contract() -> None:
    assert {each.name for each in fields(Sample)} == DEFAULTS.keys()
    sample = Sample()
    assert {name: getattr(sample, name) for name in DEFAULTS} == DEFAULTS
    assert [each.value for each in Sample.Status] == ["pending", "completed", "truncated", "aborted", "failed"]


def test_samples_share_no_list_or_dictionary() -> None:
    first, second = Sample(), Sample()
    first.tokens.append(1)
    first.metadata["a"] = 1
    assert (second.tokens, second.metadata) == ([], {})


def test_the_reward_is_a_number_or_the_entry_under_the_key() -> None:
    plain, keyed = Namespace(reward_key=None), Namespace(reward_key="score")
    assert Sample(reward=0.5).get_reward_value(plain) == 0.5
    assert Sample(reward={"score": 2.0, "acc": 1.0}).get_reward_value(keyed) == 2.0
    with pytest.raises(TypeError):
        Sample().get_reward_value(keyed)


def test_the_effective_length_is_what_the_mask_leaves() -> None:
    assert Sample(response_length=3).effective_response_length == 3
    assert Sample(response_length=3, loss_mask=[0, 1, 1]).effective_response_length == 2


def test_a_dictionary_has_the_status_as_text_and_shares_the_lists() -> None:
    sample = Sample(tokens=[1], status=Sample.Status.ABORTED)
    record = sample.to_dict()
    assert (record["status"], record["spec_info"]["spec_verify_ct"]) == ("aborted", 0)
    assert record["tokens"] is sample.tokens


def test_the_mask_begins_with_the_first_token_and_counts_those_before_as_sampled() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(None, tokens=[], log_probs=[])
    assert (sample.loss_mask, sample.rollout_log_probs) == (None, [])
    sample.append_response_tokens(None, tokens=[2, 3], log_probs=[-1.0, -2.0])
    assert sample.loss_mask == [1, 1]
    sample.append_response_tokens(None, tokens=[4], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-1.0, -2.0, 0.0])
    older = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0])
    older.append_response_tokens(None, tokens=[3], log_probs=[-2.0])
    assert older.loss_mask == [1, 1]


def test_arrays_are_taken_as_lists_and_nothing_as_no_tokens() -> None:
    sample = Sample()
    sample.append_response_tokens(tokens=np.array([2, 3]), log_probs=np.array([-1.0, -2.0]))
    sample.append_response_tokens(text="end")
    assert (sample.tokens, sample.rollout_log_probs, sample.response) == ([2, 3], [-1.0, -2.0], "end")
    assert type(sample.tokens[0]) is int


def test_tokens_of_a_tool_fill_up_logprobs_that_are_missing() -> None:
    sample = Sample(tokens=[1, 2], response_length=1)
    sample.append_response_tokens(None, tokens=[3], trainable=False)
    assert sample.rollout_log_probs == [0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"tokens": [1]}, "sampled tokens need log_probs"),
        ({}, {"tokens": [1], "log_probs": [-1.0], "trainable": False}, "have no log_probs"),
        ({}, {"tokens": [1, 2], "log_probs": [-1.0]}, "1 log_probs for 2 tokens"),
        ({"response_length": 2}, {"tokens": [1], "log_probs": [-1.0]}, "no rollout_log_probs to go on from"),
        (
            {"response_length": 2, "rollout_log_probs": [0.0, 0.0], "loss_mask": [1]},
            {"tokens": [1], "log_probs": [-1.0]},
            "loss_mask has 2 entries, the response 3 tokens",
        ),
    ],
)
def test_tokens_that_do_not_fit_are_refused(fields: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(**fields).append_response_tokens(None, **arguments)


def test_the_end_of_a_reply_is_read_where_it_has_a_reason_and_is_wanted() -> None:
    args, sample = Namespace(sglang_speculative_algorithm=None), Sample()
    told = {"weight_version": "3", "cached_tokens": 2, "prompt_tokens": 4, **SPECULATIVE}
    sample.append_response_tokens(args, tokens=[], log_probs=[], meta_info=told)
    ended = {**told, "finish_reason": {"type": "abort"}}
    sample.append_response_tokens(args, tokens=[], log_probs=[], meta_info=ended, update_terminal_info=False)
    assert (sample.weight_versions, sample.status) == ([], Sample.Status.PENDING)
    sample.append_response_tokens(args, tokens=[], log_probs=[], meta_info=ended)
    assert (sample.weight_versions, sample.status) == (["3"], Sample.Status.ABORTED)
    assert sample.prefix_cache_info.to_dict() == {"cached_tokens": 2, "total_prompt_tokens": 4}
    assert sample.spec_info == Sample.SpecInfo()


def test_counters_of_speculation_are_read_where_it_is_on() -> None:
    sample = Sample()
    for _ in range(2):
        sample.update_from_meta_info(
            Namespace(sglang_speculative_algorithm="EAGLE"), {"finish_reason": {"type": "stop"}, **SPECULATIVE}
        )
    assert (sample.spec_info.spec_accept_rate, sample.spec_info.spec_accept_length) == (0.75, 3.0)


def test_top_p_sets_and_routed_experts_of_replies_are_not_kept() -> None:
    """Not as in slime: sampling masks (``sampling.return_sampling_mask``) say what tokens were drawn from."""
    sample = Sample()
    told = {"finish_reason": {"type": "stop"}, "top_p_token_ids": "AAAA", "routed_experts": "AAAA"}
    sample.append_response_tokens(None, tokens=[1], log_probs=[-1.0], meta_info=told)
    assert (sample.rollout_top_p_token_ids, sample.rollout_routed_experts) == (None, None)
