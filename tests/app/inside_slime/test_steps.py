"""Steps with the functions that slime's users name, on a fake router of the older form."""

from __future__ import annotations

import asyncio
import copy
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.integration.slime_caller import SIZE, Source, arguments, eval_set

from rollfeed.app.inside_slime.slime_groups import SlimeGroup, SlimeMember
from rollfeed.compat.slime_plugins.names.forms import DynamicFilterOutput, GenerateFnInput, GenerateFnOutput
from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample
from rollfeed.compat.slime_rollout import generate_rollout
from rollfeed.errors import RunFailedError

CALLS: list[Any] = []
"""What functions below were called with."""


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


@pytest.fixture
def args(router: str, checkpoint: Path) -> Namespace:
    return arguments(router, checkpoint, rollout_max_context_len=300, rollout_max_response_len=20)


def path_of(function: Any) -> str:
    return f"{__name__}.{function.__name__}"


def without_choice(args: Namespace) -> Namespace:
    """Have a step draw what it needs: of more, those are its batch that end first."""
    args.over_sampling_batch_size = args.rollout_batch_size
    return args


def indices(groups: list[Any]) -> list[int]:
    return [group[0].group_index for group in groups]


def flat(output: Any) -> list[Any]:
    return [leaf for group in output.samples for each in group for leaf in (each if isinstance(each, list) else [each])]


def test_their_samples_are_filled_as_slime_fills_them(args: Namespace, source: Source) -> None:
    first = source.get_samples(1)[0]
    source.buffer.append(first)
    output = generate_rollout(without_choice(args), 0, source)
    assert output.samples[0] == first
    assert output.samples[0][0] is first[0]
    for sample in flat(output):
        assert sample.status.value == "truncated"
        assert sample.tokens[: len(sample.prompt)] == [ord(each) - 32 for each in sample.prompt]
        assert len(sample.rollout_log_probs) == sample.response_length == 20
        assert all(type(each) is int for each in sample.tokens)
        assert all(type(each) is float for each in sample.rollout_log_probs)
        assert sample.loss_mask == [1] * 20
        assert sample.weight_versions == ["0"]
        assert sample.prefix_cache_info.total_prompt_tokens == len(sample.prompt)
        assert len(sample.response) == 40  # the server's text, of two characters a token
        assert sample.session_id


def test_experts_are_those_of_all_tokens_but_the_last_as_slime_trains_with_them(
    args: Namespace, source: Source
) -> None:
    args.use_rollout_routing_replay, args.num_layers, args.moe_router_topk = True, 2, 2
    args.partial_rollout, args.over_sampling_batch_size = True, 6
    for step in range(2):
        for sample in flat(generate_rollout(args, step, source)):
            experts = sample.rollout_routed_experts
            assert (experts.dtype, experts.shape) == (np.int32, (len(sample.tokens) - 1, 2, 2))
            assert (experts.flatten() == np.arange(experts.size) % 8).all()


def test_experts_of_another_model_end_the_step(args: Namespace, source: Source) -> None:
    args.use_rollout_routing_replay, args.num_layers, args.moe_router_topk = True, 3, 2
    told = "returns 4 experts a token, where --num-layers 3 and --moe-router-topk 2 make 6"
    with pytest.raises(RunFailedError, match=told):
        generate_rollout(args, 0, source)


def test_what_a_resumed_sample_was_computed_with_before_stays(args: Namespace, source: Source) -> None:
    args.use_rollout_routing_replay, args.num_layers, args.moe_router_topk = True, 2, 2
    args.partial_rollout = True
    group = source.get_samples(1)[0]
    for sample in group:
        sample.tokens = [*[ord(each) - 32 for each in sample.prompt], 1001, 1002]
        sample.response, sample.response_length, sample.rollout_log_probs = "xy", 2, [-1.0, -2.0]
        sample.weight_versions, sample.status = ["0"], type(sample).Status.ABORTED
        sample.rollout_routed_experts = np.full((len(sample.tokens) - 1, 2, 2), 99, np.int32)
    source.buffer.append(group)
    for sample in generate_rollout(without_choice(args), 0, source).samples[0]:
        experts, num_before = sample.rollout_routed_experts, len(sample.prompt) + 1
        assert experts.shape == (len(sample.tokens) - 1, 2, 2)
        assert (experts[:num_before] == 99).all()
        assert (experts[num_before:] < 8).all()


def test_a_prompt_that_fills_the_context_is_answered_with_nothing(args: Namespace, source: Source) -> None:
    args.rollout_max_context_len = 30
    args.rollout_batch_size = args.over_sampling_batch_size = 1
    group = source.get_samples(1)[0]
    for sample in group:
        sample.prompt = "x" * 30
    source.buffer.append(group)
    for sample in flat(generate_rollout(args, 0, source)):
        assert (sample.tokens, sample.response_length, sample.rollout_log_probs) == ([ord("x") - 32] * 30, 0, [])
        assert sample.status.value == "truncated"


def test_without_partial_rollout_what_is_left_is_answered_anew_in_the_next_step(
    args: Namespace, source: Source
) -> None:
    first = generate_rollout(args, 0, source)
    assert source.num_drawn == 6
    assert not source.returned
    second = generate_rollout(without_choice(args), 1, source)
    trained = [indices(output.samples) for output in (first, second)]
    assert [sorted(each) for each in trained] == trained
    assert sorted([*trained[0], *trained[1]]) == list(range(6))
    assert source.num_drawn == 6
    assert all(sample.weight_versions == ["0"] for sample in flat(second))  # of one request each
    left = [first.metrics[f"rollout/groups_{where}"] for where in ("surplus", "requeued")]
    assert sum(left) == 3.0


def keep_every_third(args: Namespace, samples: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    CALLS.append((args, samples))
    number = samples[0].group_index % 3
    return DynamicFilterOutput(keep=number == 0, reason="one" if number == 1 else None)


def note_all(args: Namespace, groups: list[Any], data_source: Any) -> None:
    CALLS.append(("all", [group[0].group_index for group in groups], data_source.__self__))


def leave_out_first(args: Namespace, groups: list[Any]) -> None:
    groups[0][0].remove_sample = True


def test_filters_see_their_samples_and_what_they_drop_is_counted_by_reason(args: Namespace, source: Source) -> None:
    args.dynamic_sampling_filter_path = path_of(keep_every_third)
    args.rollout_all_samples_process_path = path_of(note_all)
    args.rollout_sample_filter_path = path_of(leave_out_first)
    output = generate_rollout(args, 0, source)
    trained = [group[0].group_index for group in output.samples]
    assert all(number % 3 == 0 for number in trained)
    assert [sample.remove_sample for sample in flat(output)] == [True] + [False] * 5
    seen, filtered = CALLS.pop(), [samples[0].group_index for _, samples in CALLS]
    assert all(given is args for given, _ in CALLS)
    assert seen[0] == "all"
    assert seen[2] is source
    assert set(trained) <= set(seen[1]) <= set(filtered)
    dropped = sum(number % 3 == 1 for number in seen[1])
    assert output.metrics["rollout/dynamic_filter/drop_one"] == dropped > 0


def true_keeps_nothing_but_is_short(args: Namespace, samples: list[Any]) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=samples[0].group_index < 2, reason="late", keep_when_insufficient=True)


def test_what_is_dropped_unless_the_batch_would_be_short_fills_it(args: Namespace, source: Source) -> None:
    class Ended(Source):
        def get_samples(self, num_samples: int) -> list[list[Any]]:
            return super().get_samples(min(num_samples, 4 - self.num_drawn))

    args.dynamic_sampling_filter_path = path_of(true_keeps_nothing_but_is_short)
    output = generate_rollout(args, 0, Ended())
    assert [group[0].group_index for group in output.samples] == [0, 1, 2]


async def two_turns(args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    CALLS.append((sampling_params["max_new_tokens"], evaluation))
    other = copy.deepcopy(sample)
    for each in (sample, other):
        each.append_response_tokens(args, tokens=[1, 2], log_probs=[-1.0, -2.0], text="ab")
        each.status = type(each).Status.COMPLETED
    return [sample, other]


async def group_judge(args: Namespace, samples: list[Any]) -> list[float]:
    CALLS.append(samples)
    return [float(number) for number, _ in enumerate(samples)]


def test_a_function_that_makes_several_samples_of_one_gives_nested_groups(args: Namespace, source: Source) -> None:
    args.custom_generate_function_path, args.reward_key = path_of(two_turns), None
    args.custom_rm_path = path_of(group_judge)
    output = generate_rollout(args, 0, source)
    assert [[len(each) for each in group] for group in output.samples] == [[2, 2]] * 3
    assert all(sample.response_length == 2 for sample in flat(output))
    assert [sample.reward for sample in output.samples[0][0]] == [0.0, 1.0]  # as one call for both
    assert output.metrics["passrate/pass@1"] == 1.0  # of answerings, each with the reward of its last sample


def test_group_rewards_are_asked_for_once_a_group(args: Namespace, source: Source) -> None:
    args.group_rm, args.custom_rm_path, args.reward_key = True, path_of(group_judge), None
    args.over_sampling_batch_size = 3
    output = generate_rollout(args, 0, source)
    assert [[sample.reward for sample in group] for group in output.samples] == [[0.0, 1.0]] * 3
    assert len(CALLS) == 3
    assert output.metrics["rollout/raw_reward"] == 0.5


async def of_miles(given: GenerateFnInput) -> GenerateFnOutput:
    CALLS.append(given.args)
    return GenerateFnOutput(samples=await fails_once(given.args, given.sample, given.sampling_params))


async def fails_once(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.tokens.append(7)
    sample.metadata["tried"] = True
    if sample.index not in CALLS:
        CALLS.append(sample.index)
        raise ConnectionError("the tool is away")
    assert sample.tokens == [7]  # of this try
    sample.response, sample.response_length, sample.rollout_log_probs = "7", 1, [-0.5]
    sample.status = type(sample).Status.COMPLETED
    return sample


@pytest.mark.parametrize("function", [fails_once, of_miles])
def test_what_raises_is_tried_again_from_the_sample_as_it_was_drawn(
    args: Namespace, source: Source, function: Any
) -> None:
    args.custom_generate_function_path, args.over_sampling_batch_size = path_of(function), 3
    output = generate_rollout(args, 0, source)
    assert [sample.tokens for sample in flat(output)] == [[7]] * 3 * SIZE
    assert output.metrics["rollout/groups_failed"] == 0.0


def test_a_step_that_fails_says_why_and_gives_its_prompts_to_the_next(args: Namespace, source: Source) -> None:
    args.custom_generate_function_path = path_of(fails_once)
    with pytest.raises(RunFailedError, match=r"--custom-generate-function-path.*the tool is away"):
        generate_rollout(arguments_of_many(args), 0, source)
    args.over_sampling_batch_size = 3
    output = generate_rollout(args, 1, source)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2]
    assert source.num_drawn == 20


def arguments_of_many(args: Namespace) -> Namespace:
    return Namespace(**{**vars(args), "rollout_batch_size": 20, "over_sampling_batch_size": 20})


async def slow(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    if sample.group_index % 2:
        sample.tokens, sample.response, sample.response_length = [1, 2], "b", 1
        sample.rollout_log_probs = [-1.0]
        await asyncio.sleep(60.0)
    sample.tokens, sample.response, sample.response_length, sample.rollout_log_probs = [1, 2], "b", 1, [-1.0]
    sample.status = type(sample).Status.COMPLETED
    return sample


def test_a_function_that_does_not_end_is_cancelled_and_its_sample_is_as_it_was(args: Namespace, source: Source) -> None:
    args.custom_generate_function_path, args.over_sampling_batch_size = path_of(slow), 7
    output = generate_rollout(args, 0, source)
    assert [group[0].group_index for group in output.samples] == [0, 2, 4]
    args.custom_generate_function_path = None
    output = generate_rollout(without_choice(args), 1, source)
    assert [group[0].group_index for group in output.samples] == [1, 3, 5]
    assert all(sample.response_length == 20 for sample in flat(output))


async def one_by_one(args: Namespace, sample: Any, sampling_params: dict[str, Any], **others: Any) -> Any:
    assert not others  # evaluation is for those that name it
    CALLS.append(sample.index)
    for _ in range(100):  # turns of the loop, not seconds: more than the end of a batch takes
        await asyncio.sleep(0)
    sample.tokens, sample.response, sample.response_length, sample.rollout_log_probs = [1, 2], "b", 1, [-1.0]
    sample.status = type(sample).Status.COMPLETED
    return sample


def test_what_waits_for_its_turn_when_the_batch_is_full_is_not_begun(args: Namespace, source: Source) -> None:
    args.custom_generate_function_path, args.over_sampling_batch_size = path_of(one_by_one), 20
    args.sglang_server_concurrency = args.rollout_num_gpus = 1
    generate_rollout(args, 0, source)
    assert list(range(len(CALLS))) == CALLS
    assert len(CALLS) <= 8


async def own_judge(args: Namespace, sample: Any) -> dict[str, float]:
    return {"odd": 5.0}


def hook(args: Namespace, sample: Any, *, rollout_id: int, evaluation: bool) -> None:
    sample.metadata["hooked"] = (rollout_id, evaluation)


def test_a_sample_names_its_own_judge_and_hooks_see_every_sample(args: Namespace, source: Source) -> None:
    group = source.get_samples(1)[0]
    group[1].custom_rm_path = path_of(own_judge)
    source.buffer.append(group)
    args.rollout_sample_hook_path = [path_of(hook)]
    output = generate_rollout(without_choice(args), 4, source)
    assert [sample.reward["odd"] for sample in output.samples[0]] == [0.0, 5.0]
    assert all(sample.metadata["hooked"] == (4, False) for sample in flat(output))


def test_rm_type_is_graded_by_our_hub_and_dapo_has_its_dictionary(args: Namespace, source: Source) -> None:
    args.custom_rm_path, args.rm_type, args.reward_key = None, "dapo", "score"
    assert {sample.reward["score"] for sample in flat(generate_rollout(args, 0, source))} == {-1.0}


async def not_a_number(args: Namespace, sample: Any) -> dict[str, float]:
    return {"odd": float("nan")}


def test_a_reward_that_is_none_ends_the_run_and_not_as_0(args: Namespace, source: Source) -> None:
    args.custom_rm_path = path_of(not_a_number)
    with pytest.raises(RunFailedError, match="must be finite"):
        generate_rollout(arguments_of_many(args), 0, source)


async def not_a_number_at_first(args: Namespace, sample: Any) -> dict[str, float]:
    CALLS.append(sample.index)
    return {"odd": float("nan") if CALLS.count(sample.index) == 1 else 2.0}


def test_a_reward_is_asked_for_again(args: Namespace, source: Source) -> None:
    args.custom_rm_path, args.over_sampling_batch_size = path_of(not_a_number_at_first), 3
    assert [sample.reward for sample in flat(generate_rollout(args, 0, source))] == [{"odd": 2.0}] * 6


def test_a_group_that_is_given_back_has_what_can_be_gone_on_with() -> None:
    aborted, forked, untouched, half_made = members = [
        SlimeMember(SlimeSample(index=number, prompt="p", tokens=[1])) for number in range(4)
    ]
    for member in (aborted, forked, half_made):
        sample = member.begin()
        sample.tokens = [1, 2]
        sample.response, sample.response_length, sample.rollout_log_probs = "b", 1, [-1.0]
    aborted.made, forked.made = aborted.sample, [forked.sample, SlimeSample()]
    given = SlimeGroup(members).begun(rollout_id=5)
    assert [sample.tokens for sample in given] == [[1, 2], [1], [1], [1]]
    assert [sample.metadata for sample in given] == [{"start_rollout_id": 5}, {}, {}, {}]
    aborted.sample.response_length = 0
    assert SlimeGroup(members).begun(rollout_id=6)[0].metadata == {"start_rollout_id": 5}
    assert untouched.sample is given[2]


def test_samples_of_a_group_may_have_prompts_of_their_own(args: Namespace, source: Source) -> None:
    group = source.get_samples(1)[0]
    group[1].prompt = "another one"
    source.buffer.append(group)
    for sample in generate_rollout(without_choice(args), 0, source).samples[0]:
        assert sample.tokens[: len(sample.prompt)] == [ord(each) - 32 for each in sample.prompt]
        assert len(sample.tokens) == len(sample.prompt) + 20


def test_what_was_drawn_with_a_group_that_is_wrong_comes_again(args: Namespace, source: Source) -> None:
    groups = source.get_samples(4)
    source.buffer += [groups[0], groups[1][:1], *groups[2:]]
    with pytest.raises(RunFailedError, match="a group of 1"):
        generate_rollout(args, 0, source)
    assert indices(generate_rollout(without_choice(args), 1, source).samples) == [0, 2, 3]


class Full(Source):
    is_full = True

    def add_samples(self, groups: list[list[Any]]) -> None:
        if self.is_full:
            raise OSError("the disk is full")
        super().add_samples(groups)


def test_a_step_whose_rest_is_not_taken_back_is_made_again(args: Namespace) -> None:
    args.partial_rollout, source = True, Full()
    with pytest.raises(OSError, match="the disk is full"):
        generate_rollout(args, 0, source)
    source.is_full = False
    output = generate_rollout(args, 0, source)
    assert sorted(indices(output.samples) + indices(source.buffer)) == list(range(6))
    assert len(output.samples) == len(source.returned) == 3
    assert source.num_drawn == 6


def test_a_function_that_draws_keeps_what_waits(args: Namespace, source: Source) -> None:
    """Some loops hand over the bound method, which is another object in every call."""
    first = indices(generate_rollout(args, 0, source.get_samples).samples)
    second = indices(generate_rollout(args, 1, source.get_samples).samples)
    assert len({*first, *second}) == 6
    assert set(first) <= set(range(6))
    assert source.asked == [6, 3]  # at once, as buffer filters and data sources of slime's users see it


async def calls_the_whole(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    generate_rollout(args, 9, Source())


def test_a_step_within_a_step_is_refused(args: Namespace, source: Source) -> None:
    args.custom_generate_function_path = path_of(calls_the_whole)
    with pytest.raises(RunFailedError, match="in the event loop"):
        generate_rollout(arguments_of_many(args), 0, source)


def test_mask_offpolicy_leaves_only_the_new_tokens_of_a_resumed_sample(args: Namespace, source: Source) -> None:
    args.partial_rollout = args.mask_offpolicy_in_partial_rollout = True
    group = source.get_samples(1)[0]
    for sample in group:
        sample.tokens = [*[ord(each) - 32 for each in sample.prompt], 1001, 1002]
        sample.response, sample.response_length, sample.rollout_log_probs = "xy", 2, [-1.0, -2.0]
        sample.weight_versions, sample.status = ["0"], type(sample).Status.ABORTED
    source.buffer.append(group)
    output = generate_rollout(without_choice(args), 3, source)
    for sample in output.samples[0]:
        assert sample.loss_mask == [0] * 2 + [1] * 18
        assert sample.rollout_log_probs[:2] == [-1.0, -2.0]
        assert sample.response_length == 20  # what it had counts


@pytest.mark.parametrize("values", [{"rollout_log_probs": None}, {"loss_mask": [1]}])
def test_a_response_whose_parts_do_not_fit_is_not_gone_on_with(
    args: Namespace, source: Source, values: dict[str, Any]
) -> None:
    args.partial_rollout = True
    groups = source.get_samples(20)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response, sample.response_length = [1, 2, 1001, 1002], "xy", 2
        sample.rollout_log_probs, sample.status = [-1.0, -2.0], type(sample).Status.ABORTED
        vars(sample).update(values)
    source.buffer += groups
    with pytest.raises(RunFailedError, match=r"sample \d+ has a response of 2 tokens, .* of another length"):
        generate_rollout(arguments_of_many(args), 0, source)


def test_an_evaluation_has_the_sampling_and_the_judge_of_its_set(
    args: Namespace, source: Source, tmp_path: Path
) -> None:
    generate = path_of(two_turns)
    args.eval_datasets = [
        eval_set(tmp_path / "a.jsonl", name="a", max_response_len=5),
        eval_set(tmp_path / "b.jsonl", name="b", custom_generate_function_path=generate, max_response_len=9),
    ]
    args.custom_rm_path, args.eval_reward_key, args.reward_key = None, None, None
    result = generate_rollout(args, 0, source, evaluation=True)
    assert [sample.response_length for sample in result.data["a"]["samples"]] == [5] * 6
    assert set(CALLS) == {(9, True)}
    assert len(result.data["b"]["samples"]) == 12
    assert result.data["a"]["rewards"] == [sample.reward for sample in result.data["a"]["samples"]]
    assert {"eval/a", "eval/a-truncated_ratio", "eval/a-pass@1", "eval/a-pass@2"} <= result.metrics.keys()
    assert source.num_drawn == 0


def test_an_evaluation_whose_answers_fail_says_the_first_cause(args: Namespace, source: Source, tmp_path: Path) -> None:
    args.eval_datasets = [eval_set(tmp_path / "a.jsonl", n_samples_per_eval_prompt=20)]
    args.custom_generate_function_path = path_of(fails_once)
    with pytest.raises(RunFailedError, match="the tool is away"):
        generate_rollout(args, 0, source, evaluation=True)


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ([SimpleNamespace()], r"a group of 1 from the data source, --n-samples-per-prompt is 2"),
        (None, r"--data-source-path .*draw\) returned None; it must return a list of groups"),
    ],
)
def test_a_data_source_that_gives_something_else_is_told_so(args: Namespace, group: Any, told: str) -> None:
    def draw(count: int) -> Any:
        return None if group is None else [group] * count

    with pytest.raises(RunFailedError, match=told):
        generate_rollout(args, 0, draw)


def test_messages_that_no_template_was_applied_to_are_told_so(args: Namespace, source: Source) -> None:
    group = source.get_samples(1)[0]
    for sample in group:
        sample.prompt = [{"role": "user", "content": "hi"}]
    source.buffer.append(group)
    with pytest.raises(RunFailedError, match="sample 0 has messages for its prompt: set --apply-chat-template"):
        generate_rollout(args, 0, source)
