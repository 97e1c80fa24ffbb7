"""Every mistake a user can make before a run: exit code 2, one line that says what, where and what to do."""

import json
from pathlib import Path

import pytest

DATASET = """
seed = 1
[model]
checkpoint = "{checkpoint}"
[[prompts.datasets]]
path = "{path}"
input_key = "question"
label_key = "answer"
[reward]
rm_type = "exact"
[sampling]
rollout_max_response_len = 8
[engine]
threads = 1
num_slots = 4
context_length = 128
"""


@pytest.fixture
def refused(rollfeed, tmp_path: Path):
    """Return a function that checks that `check` and `run` refuse a settings file in one line, leaving nothing."""

    def assert_refused(settings: Path, *expected: str, options: tuple[str, ...] = (), out: Path | None = None) -> None:
        out = out or tmp_path / "never"
        for command in (("check", settings, "--out", out, *options), ("run", settings, "--out", out, *options)):
            result = rollfeed(*command)
            assert result.code == 2, result.err
            assert result.out == ""
            lines = [line for line in result.err.splitlines() if line.startswith("rollfeed: ")]
            assert len(lines) == 1, result.err
            for part in expected:
                assert part in lines[0], lines[0]
            assert "Traceback" not in result.err
        assert not (tmp_path / "never").exists()

    return assert_refused


@pytest.fixture
def dataset_file(tmp_path: Path, tiny_checkpoint: Path):
    """Return a function that writes rows to a file and the settings that read it."""

    def write(rows: list[str], *, name: str = "data.jsonl", extra: str = "") -> Path:
        (tmp_path / name).write_text("".join(row + "\n" for row in rows))
        settings = tmp_path / "data.toml"
        settings.write_text(DATASET.format(checkpoint=tiny_checkpoint, path=name) + extra)
        return settings

    return write


def row(question: str = "2 + 2?", answer: str = "4") -> str:
    return json.dumps({"question": question, "answer": answer})


def test_a_misspelt_key(refused, settings_file) -> None:
    refused(settings_file("[filterz]\n"), "run.toml: filterz: unknown setting; did you mean filters?")


def test_a_wrong_type(refused, settings_file) -> None:
    refused(settings_file(), "seed = 'one'", "valid integer", options=("--set", "seed='one'"))


def test_an_impossible_combination(refused, settings_file) -> None:
    option = ("--set", "rollout.over_sampling_factor=2")
    refused(settings_file(), "over_sampling_batch_size and over_sampling_factor", "set one of them", options=option)


def test_a_filter_that_can_keep_nothing(refused, settings_file) -> None:
    settings = settings_file('[[filters.dynamic_sampling]]\nname = "reward_std"\n')
    refused(
        settings,
        "reward_std drops every group of one rollout",
        "raise rollout.n_samples_per_prompt",
        options=("--set", "rollout.n_samples_per_prompt=1"),
    )


def test_a_missing_settings_file(refused, tmp_path: Path) -> None:
    refused(tmp_path / "none.toml", "none.toml: no such settings file")


def test_a_missing_data_file(refused, dataset_file, tmp_path: Path) -> None:
    settings = dataset_file([row()])
    (tmp_path / "data.jsonl").unlink()
    refused(settings, "data.jsonl")


def test_an_unreadable_data_file(refused, dataset_file, tmp_path: Path) -> None:
    settings = dataset_file([row()])
    (tmp_path / "data.jsonl").unlink()
    (tmp_path / "data.jsonl").mkdir()
    refused(settings, "data.jsonl", "folder")


def test_a_bad_json_line_is_named_by_file_and_line(refused, dataset_file) -> None:
    refused(dataset_file([row(), row(), '{"question": "2 +', row()]), "data.jsonl:3")


def test_an_empty_data_set(refused, dataset_file) -> None:
    refused(dataset_file([]), "data.jsonl")


def test_a_missing_label_column(refused, dataset_file) -> None:
    refused(dataset_file(['{"question": "2 + 2?", "anser": "4"}']), "data.jsonl", "answer", "anser")


def test_labels_that_a_grader_needs_and_nobody_names(refused, dataset_file) -> None:
    settings = dataset_file([row()])
    settings.write_text(settings.read_text().replace('label_key = "answer"\n', ""))
    refused(settings, "rm_type = 'exact' needs labels", "label_key")


def test_prompts_that_nothing_scores(refused, dataset_file) -> None:
    settings = dataset_file([row()])
    settings.write_text(settings.read_text().replace('[reward]\nrm_type = "exact"\n', ""))
    refused(settings, "nothing scores the prompts of data.jsonl", "reward.rm_type or plugins.reward")


def test_every_prompt_over_the_length_limit(refused, dataset_file) -> None:
    refused(dataset_file([row("x" * 500), row("y" * 500)]), "data.jsonl", "rollout_max_prompt_len")


def test_r16_single_prompts_over_the_limit_are_dropped_and_counted(rollfeed, dataset_file, tmp_path: Path) -> None:
    settings = dataset_file([row("short"), row("x" * 500), row("also short")])
    ran = rollfeed(
        "run", settings, "--out", tmp_path / "run", "--json",
        "--set", "rollout.num_rollout=1", "--set", "rollout.rollout_batch_size=2",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "1 prompts of data are over" in ran.err
    shown = rollfeed("show", tmp_path / "run", "--json").json
    assert shown["ledger"]["trained"] == 2


@pytest.mark.parametrize("temperature", ["0", "-0.5", "nan"])
def test_r12_a_training_temperature_that_is_not_above_zero(refused, settings_file, temperature: str) -> None:
    option = ("--set", f"sampling.rollout_temperature={temperature}")
    refused(settings_file(), "sampling.rollout_temperature", options=option)


def test_an_unknown_environment(refused, settings_file) -> None:
    option = ("--set", "prompts.environments.0.id=core/copy_txt")
    refused(settings_file(), "core/copy_txt", "core/copy_text", options=option)


def test_a_level_that_an_environment_does_not_have(refused, settings_file) -> None:
    option = ("--set", "prompts.environments.0.level=999")
    refused(settings_file(), "core/copy_text", "999", options=option)


def test_an_unknown_filter(refused, settings_file) -> None:
    settings = settings_file('[[filters.dynamic_sampling]]\nname = "reward_sdt"\n')
    refused(settings, "filters.dynamic_sampling", "reward_sdt", "reward_std")


def test_an_unknown_parameter_of_a_filter(refused, settings_file) -> None:
    settings = settings_file('[[filters.dynamic_sampling]]\nname = "reward_std"\ntolerence = 0.1\n')
    refused(settings, "tolerence", "tolerance")


def test_an_unknown_reward(refused, dataset_file) -> None:
    refused(dataset_file([row()]), "rm_type = 'exakt'", "exact", options=("--set", "reward.rm_type=exakt"))


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ("nowhere:score", "no module 'nowhere'"),
        ("mine:nothing", "has no 'nothing'"),
        ("mine:VALUE", "not callable"),
        ("mine:too_few", "does not fit RewardFn"),
    ],
)
def test_a_plug_in_that_is_missing_not_callable_or_of_another_signature(
    refused, settings_file, tmp_path: Path, plugin: str, expected: str
) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 1\ndef too_few(one): return 1.0\n")
    refused(settings_file(), f"plugins.reward = '{plugin}'", expected, options=("--set", f"plugins.reward={plugin}"))


def test_a_run_directory_that_cannot_be_written(refused, settings_file, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    refused(settings_file(), "is not a directory; choose another --out", out=tmp_path / "file" / "run")


def test_a_run_directory_with_something_else_in_it(refused, settings_file, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    refused(settings_file(), str(tmp_path / "other"), out=tmp_path / "other")
    assert (tmp_path / "other" / "thesis.txt").read_text() == "years of work"


def test_a_checkpoint_that_is_not_there(refused, settings_file, tmp_path: Path) -> None:
    refused(settings_file(), "nowhere", options=("--set", f"model.checkpoint={tmp_path}/nowhere"))


def test_a_checkpoint_of_an_unsupported_kind(refused, settings_file, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    (folder / "model.safetensors").write_bytes(b"")
    refused(settings_file(), "BertModel", options=("--set", f"model.checkpoint={folder}"))


def test_a_context_longer_than_the_model_takes(refused, settings_file) -> None:
    refused(settings_file(), "context_length", "4096", options=("--set", "engine.context_length=4096"))


@pytest.mark.parametrize(
    "arguments",
    [(), ("runn",), ("run",), ("show",), ("env",), ("env", "sample"), ("run", "x.toml", "--sett", "a=1")],
)
def test_wrong_usage_is_exit_code_2(rollfeed, arguments: tuple[str, ...]) -> None:
    assert rollfeed(*arguments).code == 2


def test_show_of_what_is_not_a_run(rollfeed, tmp_path: Path) -> None:
    result = rollfeed("show", tmp_path)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1


def test_every_command_has_help_with_an_example(rollfeed) -> None:
    for command in (("run",), ("check",), ("show",), ("env", "list"), ("env", "sample")):
        result = rollfeed(*command, "--help")
        assert result.code == 0
        assert "example" in result.out
        assert result.out.count("rollfeed " + " ".join(command)) >= 2
