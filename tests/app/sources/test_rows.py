"""Rows of data sets against the grader that will score them, and the engine that will answer them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed import app
from rollfeed.app.checks import no_images_of
from rollfeed.app.sources import RowChecks
from rollfeed.config import EngineSettings, RemoteRewardSettings, RolloutConfig, RunSpec
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError, DataError
from rollfeed.prompts.pictures import ModelPictures
from rollfeed.testing import CharTokenizer, make_prompt
from rollfeed.types import Picture, Prompt

NO_COMMA = {"rm_type": "ifeval", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def problem_of(label: Any, *, default: str | None = None, has_function: bool = False, **metadata: Any) -> str | None:
    """Return what is wrong with a row of a file with labels."""

    def function(sample: Any, prompt: Prompt) -> float:
        return 0.0

    checks = RowChecks(
        RolloutConfig(
            reward={"functions": {"own": function}, "rm_type": default},
            plugins={"reward": function if has_function else None},
        ),
        unscored="set reward.rm_type",
        no_images=None,
    )
    prompt = Prompt(
        prompt_id="a/0", source="a", text="?", token_ids=np.arange(2, dtype=np.int32), label=label, metadata=metadata
    )
    return checks.of("a.jsonl", label_key="label", unlabelled=lambda prompt, rm_type: None)(prompt)


@pytest.mark.parametrize(
    ("rm_type", "label"),
    [
        *((name, label) for name in ("math", "dapo", "boxed_dapo") for label in ("2", 2, ["", "2"])),
        *((name, "x + 1") for name in ("deepscaler", "math_verify")),
        *((name, label) for name in ("exact", "f1", "bbeh", "boxed_exact") for label in ("a b", 1.5, ["a", "b"])),
        *(("number", label) for label in ("3 apples", "so #### 7", 4, ["1", "1/2"])),
        *(("gpqa", label) for label in ("B", "(c)", 3, "the text of a choice")),
        ("livecodebench", {"inputs": ["1"], "outputs": ["2"]}),
        ("livecodebench", json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])),
        ("random", None),
        ("random", {"any": "thing"}),
    ],
)  # fmt: skip
def test_labels_that_graders_can_use(rm_type: str, label: Any) -> None:
    assert problem_of(label, default=rm_type) is None


@pytest.mark.parametrize(
    ("rm_type", "label"),
    [
        *((name, label) for name in ("math", "exact", "f1", "number") for label in ({"a": 1}, True, [], [["2"]])),
        *((name, label) for name in ("math", "dapo", "deepscaler", "exact", "f1") for label in ("", "  ", [""])),
        ("math", r"\boxed{}"),
        *(("number", label) for label in ("none", "1 or 2", ["1", "x"])),
        *(("gpqa", label) for label in (4, -1, "", 1.5, {"A": "x"})),
        *(("livecodebench", label) for label in ("print(1)", {"inputs": [], "outputs": []}, {"inputs": ["1"]}, 5)),
    ],
)  # fmt: skip
def test_labels_that_graders_cannot_use(rm_type: str, label: Any) -> None:
    problem = problem_of(label, default=rm_type)
    assert problem is not None
    assert problem.startswith(f"rm_type {rm_type}: ")


@pytest.mark.parametrize("rm_type", ["math", "dapo", "exact", "number", "f1", "bbeh", "gpqa", "livecodebench"])
def test_a_label_that_is_missing_is_missed_where_it_is_needed(rm_type: str) -> None:
    assert problem_of(None, default=rm_type) == f"has no label in column 'label', and rm_type {rm_type!r} needs one"


def test_each_row_is_checked_for_its_own_grader() -> None:
    assert problem_of(None, default="math", **NO_COMMA) is None
    assert problem_of({"a": 1}, default="math", reward_fn="own") is None
    assert problem_of({"a": 1}, default="math", has_function=True) is None
    assert problem_of(None, default="math", correct_letter="B") is not None
    assert problem_of(None, has_function=True, rm_type="environment") is not None


@pytest.mark.parametrize(
    ("metadata", "part"),
    [
        ({"rm_type": "maths"}, "rm_type = 'maths': no such grader; did you mean math?"),
        ({"rm_type": 7}, "rm_type = 7: no such grader"),
        ({"reward_fn": "owm"}, "reward_fn = 'owm': no such function; did you mean own?"),
        ({}, "nothing scores it: set reward.rm_type"),
        ({**NO_COMMA, "instruction_id_list": ["punctuation:no_commas"]}, "did you mean punctuation:no_comma?"),
        ({**NO_COMMA, "instruction_id_list": None}, "instruction_id_list = None must be a list of ids"),
        ({**NO_COMMA, "kwargs": [{}, {}]}, "kwargs must be a list with 1 entries"),
        ({**NO_COMMA, "instruction_id_list": ["keywords:existence"]}, "keywords = None must be a list of texts"),
        (
            {
                **{"rm_type": "ifbench", "instruction_id_list": ["length_constraints:nth_paragraph_first_word"]},
                **{"kwargs": [{"nth_paragraph": 2, "num_paragraphs": 3}]},
            },
            "first_word = None must be a text",
        ),
        ({"rm_type": "environment"}, "no environment and params"),
        ({"rm_type": "environment", "environment": "core/copy_txt", "params": {}}, "core/copy_text"),
        ({"rm_type": "environment", "environment": "core/copy_text", "params": {}}, "verify raised KeyError"),
        ({"rm_type": "rlve", "environment": "core/copy_text"}, "has no config with the problem"),
        ({"rm_type": "rlve", "environment": None}, "rm_type rlve needs an environment's id"),
        ({"rm_type": "rlve", "environment": "core/nothing_like_it"}, "there is none"),
        ({"rm_type": "rlve", "environment": "Sortingg", "config": {"parameter": {}}}, "environment 'Sortingg'"),
        ({"rm_type": "dapo", "reward_key": "accuracy"}, "rewards of rm_type 'dapo' have the keys acc, score"),
        ({"rm_type": "remote_rm"}, "no server: set reward.remote.url"),
        ({"rm_type": "gpqa", "choices": 5}, "choices = 5 in the metadata must be a list"),
        ({"rm_type": "gpqa", "choices": ["x", "y"], "correct_letter": "C"}, "'C', which is not one of A: 'x', B: 'y'"),
        ({"rm_type": "gpqa", "valid_letters": [], "correct_letter": "A"}, "valid_letters = [] in the metadata"),
    ],
)  # fmt: skip
def test_metadata_that_nothing_can_score_by(metadata: dict[str, Any], part: str) -> None:
    problem = problem_of("2", **metadata)
    assert problem is not None
    assert part in problem


def test_metadata_that_brings_what_is_needed() -> None:
    copy = {"rm_type": "rlve", "environment": "core/copy_text", "problem_difficulty": 0, "config": {"seed": 5}}
    assert problem_of(None, **copy) is None
    assert problem_of(None, rm_type="gpqa", choices={"A": "x", "B": "y"}, correct_letter="B") is None
    assert problem_of("y", rm_type="gpqa", choices=["x", "y"]) is None
    assert problem_of("z", rm_type="gpqa", choices=["x", "y"]) is not None


def test_a_reward_server_takes_any_label() -> None:
    config = RolloutConfig(reward={"rm_type": "remote_rm", "remote": RemoteRewardSettings(url="http://127.0.0.1:1/")})
    checks = RowChecks(config, unscored="", no_images=None)
    prompt = Prompt(prompt_id="a/0", source="a", text="?", token_ids=np.arange(2, dtype=np.int32))
    assert checks.of("a.jsonl", label_key=None, unlabelled=lambda prompt, rm_type: rm_type)(prompt) is None


def settings_for(checkpoint: Path, folder: Path, rows: list[dict[str, Any]], **sections: Any) -> Any:
    (folder / "a.jsonl").write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "model": {"checkpoint": str(checkpoint)},
        "prompts": {"datasets": [{"path": "a.jsonl", "label_key": "label", "metadata_key": "metadata"}]},
        "engine": {"threads": 1, "num_slots": 4, "context_length": 256},
        "reward": {"rm_type": "math"},
    }
    return validate_settings({**tree, **sections}, where="test")


ROWS = [
    {"prompt": "1+1?", "label": "2", "metadata": None},
    {"prompt": "Write.", "label": None, "metadata": NO_COMMA},
    {"prompt": "1+2?", "label": {"answer": "3"}},
]


def test_the_first_row_that_cannot_be_scored_is_named_by_file_and_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:4: rm_type math: the label is \{'answer': '3'\}; .* mend the row"):
        app.prepare(RunSpec(settings_for(tiny_checkpoint, tmp_path, ROWS), (tmp_path,)))


def test_rows_that_cannot_be_scored_are_skipped_where_bad_rows_are(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, ROWS)
    prompts = settings.prompts.model_copy(update={"skip_bad_rows": True, "num_epoch": 2})
    prepared = app.prepare(RunSpec(settings.model_copy(update={"prompts": prompts}), (tmp_path,)))
    assert prepared.data_limit is not None
    assert prepared.data_limit.num_prompts == 2


def test_labels_that_no_column_has_are_asked_for(tiny_checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "metadata": {"rm_type": "random"}}, {"prompt": "1+2?", "metadata": {"rm_type": "exact"}}]
    settings = settings_for(
        tiny_checkpoint, tmp_path, rows, prompts={"datasets": [{"path": "a.jsonl", "metadata_key": "metadata"}]}
    )
    with pytest.raises(ConfigError, match=r"rm_type = 'exact' needs labels, and a\.jsonl has none: set its label_key"):
        app.prepare(RunSpec(settings, (tmp_path,)))


def test_rows_of_eval_sets_are_checked_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    dataset = {"path": "a.jsonl", "label_key": "label", "metadata_key": "metadata"}
    settings = settings_for(tiny_checkpoint, tmp_path, ROWS, eval={"datasets": [dataset]})
    with pytest.raises(ConfigError, match=r"eval set a\.jsonl: .*a\.jsonl:4: rm_type math: the label is"):
        app.prepare_evaluation(
            settings.eval, config=settings, tokenizer=CharTokenizer(), context_length=256, folders=[tmp_path]
        )


WITH_IMAGES = {"path": "a.jsonl", "label_key": "label", "image_key": "image"}
REFUSED = r"a\.jsonl: a/1 has images, and the embedded engine takes text only with a model .*: remove image_key"


@pytest.fixture
def images() -> list[dict[str, Any]]:
    return [{"prompt": "1+1?", "label": "2", "image": None}, {"prompt": "1+1?", "label": "2", "image": ["a.png"]}]


def test_images_are_refused_where_the_engine_takes_text_only(tiny_checkpoint: Path, tmp_path: Path, images) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, images, prompts={"datasets": [WITH_IMAGES]})
    with pytest.raises(ConfigError, match=REFUSED):
        app.prepare(RunSpec(settings, (tmp_path,)))


@pytest.mark.parametrize("section", ["prompts", "eval"])
def test_problems_with_pictures_are_refused_where_the_engine_takes_text_only(
    tiny_checkpoint: Path, tmp_path: Path, section: str
) -> None:
    chosen = {section: {"environments": [{"id": "core/name_colour"}]}}
    settings = settings_for(tiny_checkpoint, tmp_path, [{"prompt": "1+1?", "label": "2"}], **chosen)
    refusal = r"core/name_colour@0: its problems have pictures, which the model, \[teacher\] or \[cluster\] does not"
    if section == "prompts":
        with pytest.raises(ConfigError, match=refusal):
            app.prepare(RunSpec(settings, (tmp_path,)))
        return
    model = app.load_settings_model(settings)
    with pytest.raises(ConfigError, match=refusal):
        app.prepare_evaluation(
            settings.eval,
            config=settings,
            tokenizer=model.tokenizer,
            context_length=256,
            no_images=no_images_of(settings.engine, model),
            picture_input=model.picture_input,
        )


def test_images_of_eval_sets_are_refused_too(tiny_checkpoint: Path, tmp_path: Path, images) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, images, eval={"datasets": [WITH_IMAGES]})
    model = app.load_settings_model(settings)
    with pytest.raises(ConfigError, match=REFUSED):
        app.prepare_evaluation(
            settings.eval,
            config=settings,
            tokenizer=model.tokenizer,
            context_length=256,
            folders=[tmp_path],
            no_images=no_images_of(settings.engine, model),
        )


@pytest.mark.parametrize(
    "reward",
    [{"rm_type": "reward_model"}, {"mixture": [{"rm_type": "random"}, {"rm_type": "reward_model", "weight": 0.1}]}],
)
def test_images_are_refused_where_a_reward_model_scores(reward: dict[str, Any]) -> None:
    config = RolloutConfig(reward={**reward, "model": {"checkpoint": "x"}})
    check = RowChecks(config, unscored=None, no_images=None).of(
        "a.jsonl", label_key=None, unlabelled=lambda prompt, rm_type: None
    )
    assert check(make_prompt("?")) is None
    picture = Picture(content_hash="0" * 64, media_type="image/png", width=1, height=1)
    with pytest.raises(ConfigError, match=r"a\.jsonl: made/0 has images, and the reward model takes text only"):
        check(make_prompt("?", images=(picture,)))


def test_an_image_key_without_images_is_no_mistake(tiny_checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "label": "2", "image": None}]
    settings = settings_for(tiny_checkpoint, tmp_path, rows, prompts={"datasets": [WITH_IMAGES]})
    app.prepare(RunSpec(settings, (tmp_path,)))


def test_servers_of_a_text_model_take_no_images(tmp_path: Path) -> None:
    model = app.Model(checkpoint=tmp_path, tokenizer=CharTokenizer())
    servers = EngineSettings(sglang={"workers": ["http://127.0.0.1:1"]})
    needed = "by the model's processor, whose files .* lacks"
    assert re.search(needed, str(no_images_of(servers, model)))
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    assert re.search(needed, str(no_images_of(servers, model)))
    assert no_images_of(servers, replace(model, pictures=ModelPictures(tmp_path, model.store))) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "takes text only" in str(no_images_of(servers, model))
