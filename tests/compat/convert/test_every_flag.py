"""Each flag of slime's and miles's command line becomes settings, or is reported with a reason."""

from pathlib import Path

import pytest
from tests.compat.setting_keys import is_setting

from rollfeed.compat.convert.conversion import convert_script
from rollfeed.compat.convert.table import FLAGS, Flag

BESIDE = "--rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 3 --rollout-max-response-len 64"
VALUES = {
    "int": "7",
    "float": "0.5",
    "text": "some.module.name",
    "texts": "one two",
    "ints": "3 4",
    "json": '\'{"image": "pictures"}\'',
    "append": "some.hook",
}
FITTING = {
    "num-epoch": "3",
    "over-sampling-batch-size": "16",
    "global-batch-size": "16",
    "rollout-max-prompt-len": "64",
    "rollout-max-context-len": "256",
    "eval-max-context-len": "256",
    "sglang-context-length": "256",
    "rollout-top-k": "20",
    "loss-mask-type": "qwen3",
    "advantage-estimator": "gspo",
    "kl-loss-type": "k2",
    "loss-type": "policy_loss",
    "eps-clip-c": "3.0",
    "pause-generation-mode": "in_place",
    "rm-url": "http://host:1/rm",
    "rollout-submission-granularity": "sample",
    "async-unused-samples-handler": "retry",
    "lr-decay-style": "cosine",
    "opd-teacher-urls": "math=http://host:1",
}


def script_with(flag: Flag, tmp_path: Path) -> str:
    value = FITTING.get(flag.name, VALUES.get(flag.takes, ""))
    if flag.name in ("eval-config", "custom-config-path"):
        file = tmp_path / "given.yaml"
        file.write_text("datasets: [{name: a, path: a.jsonl}]" if flag.name == "eval-config" else "rollout_top_p: 0.9")
        value = str(file)
    return " ".join([BESIDE, f"--{flag.name}", value])


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_each_flag_becomes_settings_or_is_reported_with_a_reason(flag: Flag, tmp_path: Path) -> None:
    converted = convert_script(script_with(flag, tmp_path), source="flags")
    reported = {each.what.split()[0]: each.reason for each in converted.left}
    assert converted.carried.get(flag.name) or f"--{flag.name}" in reported
    assert all(reported.values())


@pytest.mark.parametrize("flag", [flag for flag in FLAGS.values() if flag.is_direct], ids=lambda flag: flag.name)
def test_a_flag_that_is_one_setting_is_carried_over(flag: Flag, tmp_path: Path) -> None:
    beside = " --eval-prompt-data a a.jsonl" if flag.becomes[0].startswith("eval.") else ""
    converted = convert_script(script_with(flag, tmp_path) + beside, source="flags")
    assert flag.becomes[0] in converted.carried[flag.name]


def test_what_flags_become_are_settings_that_there_are() -> None:
    targets = {key for flag in FLAGS.values() for key in flag.becomes if not key.startswith("(")}
    assert [key for key in sorted(targets) if not is_setting(key)] == []


def test_a_flag_that_is_not_carried_over_has_a_reason_in_the_table() -> None:
    assert [flag.name for flag in FLAGS.values() if not flag.becomes and not flag.text] == []


def test_the_table_has_all_flags_of_both_projects() -> None:
    counts = {of: sum(of in flag.of for flag in FLAGS.values()) for of in "sm"}
    assert counts["s"] >= 223
    assert counts["m"] >= 354
