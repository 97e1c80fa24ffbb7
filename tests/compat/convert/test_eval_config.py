"""slime's files of evaluation sets are read with its precedence, and unknown keys refused with file and line."""

import base64
from pathlib import Path
from typing import Any

import pytest

from rollfeed.compat.convert.conversion import convert_script
from rollfeed.compat.convert.eval_config import read_eval_config
from rollfeed.compat.convert.eval_flags import eval_overrides
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError

GOOD = """\
eval:
  defaults: &defaults
    n_samples_per_eval_prompt: 4
    temperature: 0.7
    max_response_len: 256
  datasets:
    - name: aime
      path: aime.jsonl@[0:30]
      rm_type: math
      temperature: 0
      tool_key: functions
      stop: "\\n\\n"
      multimodal_keys: {image: pictures, video: films}
      metadata_overrides: {split: test}
    - name: gpqa
      path: gpqa.parquet
      input_key: question
      apply_chat_template: true
"""


def tree_of(text: str, tmp_path: Path, flags: str = "") -> dict[str, Any]:
    file = tmp_path / "eval.yaml"
    file.write_text(text)
    line = f"--rollout-batch-size 8 --rollout-max-response-len 64 --eval-config {file} {flags}"
    found: dict[str, Any] = convert_script(line, source="flags").tree["eval"]
    return found


def test_sets_go_before_defaults_and_these_before_flags(tmp_path: Path) -> None:
    tree = tree_of(
        GOOD, tmp_path, "--eval-temperature 0.2 --eval-top-p 0.9 --n-samples-per-eval-prompt 8 --label-key answer"
    )
    assert (tree["n_samples_per_prompt"], tree["temperature"], tree["top_p"]) == (4, 0.7, 0.9)
    assert tree["label_key"] == "answer"
    aime, gpqa = tree["datasets"]
    assert (aime["temperature"], aime["tools_key"], aime["image_key"], aime["stop"]) == (
        0,
        "functions",
        "pictures",
        ["\n\n"],
    )
    assert (gpqa["input_key"], gpqa["apply_chat_template"]) == ("question", True)
    assert tree["input_key"] == "input"


def test_sets_may_be_a_mapping_by_name_without_eval_around_it_and_in_json(tmp_path: Path) -> None:
    tree = tree_of('{"datasets": {"aime": {"path": "a.jsonl", "temperature": 1e-1}}}', tmp_path)
    assert tree["datasets"] == [{"name": "aime", "path": "a.jsonl", "temperature": 0.1}]
    merged = "base: &b {temperature: 0.5}\n"
    with pytest.raises(ConfigError, match=r"eval\.yaml:1: base: unknown key in eval"):
        tree_of(merged + "datasets: [{name: a, path: b, <<: *b}]", tmp_path)
    inline = "base64:" + base64.b64encode(b"datasets: [{name: a, path: b}]").decode()
    assert [each["name"].value for each in read_eval_config(inline).datasets] == ["a"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            GOOD.replace("temperature: 0.7", "temprature: 0.7"),
            ":4: temprature: unknown key of a set; did you mean temperature",
        ),
        (GOOD.replace("      rm_type", "      rm_typ"), ":9: rm_typ: unknown key of a set; did you mean rm_type"),
        (GOOD.replace("  datasets:", "  sets:"), ":6: sets: unknown key in eval; did you mean datasets"),
        (GOOD + "other: 1\n", ":19: other: unknown key in the file"),
        ("eval:\n  datasets:\n    - name: aime\n", ":3: the set has no path"),
        ("eval:\n  datasets:\n    - {path: a, path: b, name: c}\n", ":3: path is there twice"),
        ("eval:\n  defaults: 3\n", ":2: must be a mapping"),
        ("eval:\n  datasets: []\n", "there are no sets in eval.datasets"),
        ("eval: [\n", ":2: not valid YAML"),
        ("", "is empty"),
        (GOOD.replace("temperature: 0.7", "temperature: hot"), "eval.yaml:4: temperature: eval.temperature = 'hot'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line_with_its_place(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        tree_of(text, tmp_path)
    assert "\n" not in str(refused.value)


def test_keys_without_a_counterpart_are_reported_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(GOOD)
    found = convert_script(f"--rollout-batch-size 8 --eval-config {file}", source="flags")
    assert [each.what.rpartition("/")[2] for each in found.left] == [
        "eval.yaml:14: metadata_overrides",
    ]


def test_the_same_flags_are_overrides_of_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(GOOD)
    overrides, left = eval_overrides(["--eval-config", str(file), "--eval-top-k", "20", "--eval-temperature", "0.1"])
    settings = validate_settings({}, where="run.toml", overrides=overrides)
    assert (settings.eval.temperature, settings.eval.top_k, settings.eval.n_samples_per_prompt) == (0.7, 20, 4)
    assert [each.name for each in settings.eval.datasets] == ["aime", "gpqa"]
    assert settings.eval.input_key is None
    assert len(left) == 1
