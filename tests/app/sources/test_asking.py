"""The forms in which data sets and environments ask, through the tokenizer of a chat model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollfeed import app
from rollfeed.app.sources import RowChecks, build_source
from rollfeed.config import EvalKeys, RolloutConfig, RunSpec, SamplingSettings, Settings
from rollfeed.config.load import validate_settings
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.environments import EnvironmentRegistry, make_task
from rollfeed.errors import ConfigError
from rollfeed.evaluation.sets import TrainingDefaults, plan_set
from rollfeed.prompts import load_tokenizer
from rollfeed.protocols import AnswerMarker, Tokenizer
from rollfeed.rewards.registry import BUILTIN_GRADERS, reads
from rollfeed.types import Correct, Prompt

TINY_ZERO: dict[str, Any] = {"custom_prompt_preprocessor": "TinyZero", "apply_chat_template": False}
CHAT: dict[str, Any] = {"custom_prompt_preprocessor": "ChatTemplate_NoSystemPrompt"}
BOXED: dict[str, Any] = {"answer_marker_type": "\\boxed{}"}
TAGS: dict[str, Any] = {"answer_marker_type": "<answer></answer>"}
ADD = "core/add_numbers"


def settings_of(tree: dict[str, Any]) -> Settings:
    return validate_settings(tree, where="run.toml")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_checkpoint(DEFAULT_MODEL))


async def drawn(tokenizer: Tokenizer, tmp_path: Path, keys: dict[str, Any], rm_type: str = "exact") -> list[Prompt]:
    """Return a prompt of a data set, and one of an environment, that are asked alike."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "What is {x} + 1?", "label": "2"}\n')
    prompts = []
    for tree in (
        {"datasets": [{"path": "a.jsonl", "label_key": "label", **keys}]},
        {"environments": [{"id": ADD, **keys}]},
    ):
        settings = settings_of({"prompts": tree, "reward": {"rm_type": rm_type}})
        checks = RowChecks(RolloutConfig(reward={"rm_type": rm_type}), unscored="", no_images=None)
        prompts += await build_source(settings, tokenizer, folders=[tmp_path], rows=checks).draw(1)
    return prompts


async def test_tiny_zero_is_a_dialogue_in_plain_text_whose_thoughts_are_begun(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for prompt in await drawn(tokenizer, tmp_path, TINY_ZERO):
        assert prompt.messages is None
        before, _, rest = prompt.text.partition("\nUser: ")
        question, _, opening = rest.partition("\nAssistant: ")
        assert question.startswith("What is ")
        assert opening == "<think>"
        assert all(tag in before for tag in ("<think>", "</think>", "<answer>", "</answer>"))
        assert "<|im_start|>" not in prompt.text
        assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
    assert "What is {x} + 1?" in (await drawn(tokenizer, tmp_path, TINY_ZERO))[0].text


async def test_chat_form_is_one_user_turn_with_the_question_as_it_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain, chat = [await drawn(tokenizer, tmp_path, keys) for keys in ({}, CHAT)]
    for ours, theirs in zip(plain, chat, strict=True):
        assert (ours.text, ours.messages, ours.token_ids.tolist()) == (
            theirs.text,
            theirs.messages,
            theirs.token_ids.tolist(),
        )
        assert [message["role"] for message in theirs.messages or ()] == ["user"]


@pytest.mark.parametrize(
    ("keys", "mark"),
    [
        (CHAT | BOXED, "\\boxed{}"),
        (BOXED, "\\boxed{}"),
        (TAGS, "<answer>"),
        (TAGS | {"apply_chat_template": False}, "<answer>"),
    ],
)
async def test_marks_are_asked_for_behind_the_question(
    tokenizer: Tokenizer, tmp_path: Path, keys: dict[str, Any], mark: str
) -> None:
    for prompt in await drawn(tokenizer, tmp_path, keys):
        asked = prompt.text if prompt.messages is None else str(prompt.messages[0]["content"])
        question, _, sentence = asked.partition("\n")
        assert question.startswith("What is ")
        assert mark in sentence


async def test_dialogue_asks_for_its_marks_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with_marks, without = [await drawn(tokenizer, tmp_path, keys) for keys in (TINY_ZERO | TAGS, TINY_ZERO)]
    assert [prompt.text for prompt in with_marks] == [prompt.text for prompt in without]


async def test_messages_stay_as_they_are(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    for keys in (CHAT | BOXED, {}):
        settings = settings_of({"prompts": {"num_epoch": 1, "datasets": [{"path": "a.jsonl", **keys}]}})
        (prompt,) = await build_source(settings, tokenizer, folders=[tmp_path]).draw(1)
        assert [message["content"] for message in prompt.messages or ()] == ["Be brief.", "Hi"]
    settings = settings_of({"prompts": {"num_epoch": 1, "datasets": [{"path": "a.jsonl", **TINY_ZERO}]}})
    with pytest.raises(ConfigError, match="a list of messages needs the chat template"):
        build_source(settings, tokenizer, folders=[tmp_path])


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            TINY_ZERO | BOXED,
            r"answer_marker_type = '\\\\boxed{}' does not go with .*'TinyZero': use '<answer></answer>'",
        ),
        (CHAT | TAGS, r"does not go with .*ChatTemplate_NoSystemPrompt': use '\\\\boxed{}'"),
        (TINY_ZERO | {"apply_chat_template": True}, "'TinyZero' needs none: set apply_chat_template = false"),
        (CHAT | {"apply_chat_template": False}, "needs a chat template: set apply_chat_template = true"),
        ({"custom_prompt_preprocessor": "TinyZer0"}, "TinyZero"),
    ],
)
def test_forms_marks_and_templates_that_do_not_fit_are_refused(keys: dict[str, Any], problem: str) -> None:
    for tree in ({"datasets": [{"path": "a", **keys}]}, {"environments": [{"id": ADD, **keys}]}):
        with pytest.raises(ConfigError, match=problem):
            settings_of({"prompts": tree})


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"id": "core/guess_number", **TINY_ZERO}, "takes several turns, and TinyZero has one"),
        ({"id": "core/sort_numbers", "parameters": {"style": "compact"}, **BOXED}, "style = 'compact' says all itself"),
    ],
)
def test_environments_that_cannot_be_asked_so_are_refused(
    tokenizer: Tokenizer, environment: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_source(settings_of({"prompts": {"environments": [environment]}}), tokenizer)


@pytest.mark.parametrize(
    ("rm_type", "keys"),
    [("math", TINY_ZERO), ("boxed_exact", TAGS), ("deepscaler", TAGS), ("dapo", BOXED), ("f1", TINY_ZERO)],
)
async def test_marks_that_the_grader_does_not_read_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, rm_type: str, keys: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"a.jsonl: answers are asked for in .*rm_type '{rm_type}' reads none"):
        await drawn(tokenizer, tmp_path, keys, rm_type)


@pytest.mark.parametrize("keys", [BOXED, {"adaptive": True}])
def test_what_is_learned_as_it_stands_is_not_asked(tokenizer: Tokenizer, tmp_path: Path, keys: dict[str, Any]) -> None:
    tree = {
        "prompts": {"datasets": [{"path": "a.jsonl", **keys}]},
        "rollout": {"mode": "sft", "n_samples_per_prompt": 1},
    }
    with pytest.raises(
        ConfigError, match="remove custom_prompt_preprocessor, answer_marker_type, system_prompt and adaptive"
    ):
        build_source(settings_of(tree), tokenizer, folders=[tmp_path])


@pytest.mark.parametrize("rm_type", ["exact", "number", "math_verify", "gpqa", "bbeh"])
def test_graders_that_read_both_forms_find_the_answer_in_both(rm_type: str) -> None:
    label = "B" if rm_type == "gpqa" else "42"
    for response in (f"It takes 7 steps.</think>\n<answer>{label}</answer>", f"It takes 7 steps.\n\\boxed{{{label}}}"):
        assert BUILTIN_GRADERS[rm_type](response, label, {}).correct is Correct.YES, response
    assert BUILTIN_GRADERS[rm_type]("7 steps</think><answer>0</answer>", label, {}).correct is Correct.NO


def test_whatever_is_said_to_read_marks_does() -> None:
    for rm_type in ("exact", "number", "math_verify", "math", "deepscaler", "bbeh", "gpqa", "dapo", "f1"):
        label = "B" if rm_type == "gpqa" else "42"
        for marker, answer in (
            (AnswerMarker.BOXED, f"\\boxed{{{label}}}"),
            (AnswerMarker.TAGS, f"<answer>{label}</answer>"),
        ):
            found = BUILTIN_GRADERS[rm_type](f"First 1.</think>So: {answer}", label, {}).correct is Correct.YES
            assert found is reads(rm_type, marker), (rm_type, marker)


@pytest.mark.parametrize("environment_id", [each for each in EnvironmentRegistry().ids() if each.startswith("core/")])
def test_environments_read_the_answers_of_both_forms(environment_id: str) -> None:
    environment = EnvironmentRegistry().get(environment_id)
    task = make_task(environment, level=1, index=0, run_seed=0)
    for response in (f"7 or 8?</think> <answer> {task.answer} </answer>", f"It is \\boxed{{{task.answer}}}."):
        assert environment.verify(task.params, response).correct is Correct.YES


def test_eval_sets_are_asked_as_they_or_their_defaults_say() -> None:
    training = TrainingDefaults(
        sampling=SamplingSettings(), n_samples_per_prompt=1, rm_type=None, reward_key=None, context_length=4096
    )
    plan = plan_set("a", EvalKeys(**BOXED), EvalKeys(**CHAT), training)
    assert (plan.custom_prompt_preprocessor, plan.answer_marker_type) == (
        CHAT["custom_prompt_preprocessor"],
        "\\boxed{}",
    )
    with pytest.raises(ConfigError, match="eval set a: answer_marker_type"):
        plan_set("a", EvalKeys(**TAGS), EvalKeys(**CHAT), training)


def test_evaluation_asks_data_sets_and_environments_in_their_form(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "What is 1 + 1?", "label": "2"}\n')
    settings = settings_of(
        {
            "eval": {
                "datasets": [{"path": "a.jsonl", "label_key": "label", "rm_type": "exact"}],
                "environments": [{"id": ADD, "num_prompts": 1}],
                **TINY_ZERO,
            }
        }
    )
    prepared = app.prepare_evaluation(
        settings.eval, config=settings, tokenizer=tokenizer, context_length=4096, folders=[tmp_path]
    )
    assert all(each.prompts[0].text.endswith("\nAssistant: <think>") for each in prepared.sets)


async def test_a_system_prompt_goes_before_data_sets_and_environments(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for prompt in await drawn(tokenizer, tmp_path, {"system_prompt": "Answer with a number."}):
        assert prompt.messages is not None
        assert prompt.messages[0] == {"role": "system", "content": "Answer with a number."}
        assert "Answer with a number." in prompt.text


def test_an_evaluation_set_has_its_own_system_prompt_or_that_of_all() -> None:
    training = TrainingDefaults(
        sampling=SamplingSettings(), n_samples_per_prompt=1, rm_type=None, reward_key=None, context_length=4096
    )
    plan = plan_set("a", EvalKeys(), EvalKeys(system_prompt="Be brief."), training)
    assert plan.system_prompt == "Be brief."
    assert plan_set("a", EvalKeys(system_prompt="Own."), EvalKeys(system_prompt="x"), training).system_prompt == "Own."


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"system_prompt": "s", "apply_chat_template": False}, "system_prompt needs a chat template"),
        ({"system_prompt": "s", **CHAT}, "has no system prompt"),
        ({"template": "{a}", "input_key": "b"}, "input_key and template both say what is asked"),
        ({"template": "what?"}, "names no column"),
        ({"template": "\\boxed{} {a}"}, r"\{\} names no column: write \{name\} for a column, and \{\{"),
        ({"template": "{a"}, r"expected '\}' before end of string: write \{name\}"),
    ],
)
def test_what_does_not_go_together_in_a_question_is_refused(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        settings_of({"prompts": {"datasets": [{"path": "a.jsonl", **keys}]}})


async def test_files_that_a_pattern_names_are_found_beside_the_settings(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,label\nq,2\n")
    dataset = {"path": "*.csv", "label_key": "label", "template": "so {prompt}"}
    source = build_source(settings_of({"prompts": {"datasets": [dataset]}}), tokenizer, folders=[tmp_path])
    (prompt,) = await source.draw(1)
    assert "so q" in prompt.text


def test_a_chat_template_is_found_beside_the_settings(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("x")
    (tmp_path / "run.toml").write_text('[model]\nchat_template = "own.jinja"\n[[eval.datasets]]\npath = "a"\n')
    assert RunSpec.load(tmp_path / "run.toml").settings.model.chat_template == str(tmp_path / "own.jinja")
