from pathlib import Path
from typing import Any

import pytest

from rollfeed.config import RunSpec, Settings, read_stored, stored_identity, stored_values
from rollfeed.errors import ConfigError

MINIMAL = '[[prompts.environments]]\nid = "core/copy_text"\n'


def load(tmp_path: Path, text: str, *overrides: str) -> Settings:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return RunSpec.load(path, overrides).settings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_byte_order_mark_and_line_ends_of_windows_are_taken(tmp_path: Path, encoding: str, newline: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(MINIMAL.replace("\n", newline).encode(encoding))
    assert RunSpec.load(path).settings.prompts.environments[0].id == "core/copy_text"


def test_a_file_in_utf16_is_told_to_be_saved_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(MINIMAL.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"not UTF-8 text .*; save it as UTF-8"):
        RunSpec.load(tmp_path / "run.toml")


@pytest.mark.parametrize("written", ["2026-01-31", '"2026-01-31"', "2026-01-31T12:00:00", '"2026-01-31 12:00:00"'])
def test_the_date_of_templates_is_one_of_toml_or_a_text(tmp_path: Path, written: str) -> None:
    settings = load(tmp_path, f"[model]\ntemplate_date = {written}\n{MINIMAL}", f"model.template_date={written}")
    date = settings.model.template_datetime
    assert date is not None
    assert date.isoformat() in ("2026-01-31T00:00:00", "2026-01-31T12:00:00")


@pytest.mark.parametrize("written", ["2026", '"today"', "12:00:00"])
def test_what_is_no_date_is_refused(tmp_path: Path, written: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.template_date"):
        load(tmp_path, f"[model]\ntemplate_date = {written}\n{MINIMAL}")


def test_variables_of_the_template_decide_what_a_run_is_and_its_date_does_not(tmp_path: Path) -> None:
    plain = load(tmp_path, MINIMAL)
    assert load(tmp_path, MINIMAL, "model.template_date=2026-01-31").identity() == plain.identity()
    thinking = load(tmp_path, MINIMAL, "model.chat_template_kwargs={thinking = {on = false}}")
    assert thinking.model.chat_template_kwargs == {"thinking": {"on": False}}
    assert thinking.identity() != plain.identity()


def test_later_files_win_lists_are_replaced_and_tables_merged(tmp_path: Path) -> None:
    base, more, last = (tmp_path / name for name in ("base.toml", "more.toml", "other/last.toml"))
    base.write_text(f"seed = 1\n[rollout]\nnum_rollout = 7\nrollout_batch_size = 3\n{MINIMAL}")
    more.write_text('[rollout]\nrollout_batch_size = 5\n[[prompts.environments]]\nid = "core/add_numbers"\n')
    last.parent.mkdir()
    last.write_text("seed = 2\n")
    spec = RunSpec.load([base, more, last], ["rollout.n_samples_per_prompt=6"])
    rollout = spec.settings.rollout
    sizes = (rollout.num_rollout, rollout.rollout_batch_size, rollout.n_samples_per_prompt)
    assert (spec.settings.seed, *sizes) == (2, 7, 5, 6)
    assert [each.id for each in spec.settings.prompts.environments] == ["core/add_numbers"]
    assert spec.folders == (last.parent, tmp_path, Path.cwd())
    assert spec.chosen == {"rollout.n_samples_per_prompt"}


def test_an_error_names_all_files_that_were_read(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(MINIMAL)
    (tmp_path / "more.toml").write_text("[rollout]\nnum_rollout = 0\n")
    with pytest.raises(ConfigError, match=r"base\.toml, .*more\.toml: rollout\.num_rollout = 0"):
        RunSpec.load([tmp_path / "base.toml", tmp_path / "more.toml"])


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("num_rollout=3", "num_rollout: unknown setting; did you mean rollout.num_rollout?"),
        ("num_rolout=3", "num_rolout: unknown setting; did you mean rollout.num_rollout?"),
        ("engine.rm_type=a", "engine.rm_type: unknown setting; did you mean reward.rm_type or eval.rm_type?"),
        ("rollout.top_k=3", "rollout.top_k: unknown setting; did you mean sampling.rollout_top_k or eval.top_k?"),
    ],
)
def test_a_key_without_its_table_is_answered_with_the_full_key(tmp_path: Path, override: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, MINIMAL, override)
    assert str(refused.value).endswith(meant)


def test_defaults_fill_what_a_file_leaves_out(tmp_path: Path) -> None:
    settings = load(tmp_path, MINIMAL)
    assert settings.seed == 0
    assert settings.rollout.rollout_batch_size == 4
    assert settings.prompts.environments[0].id == "core/copy_text"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeed = 1\n", "seeed: unknown setting; did you mean seed?"),
        (
            "[rollout]\nrollout_batch_sise = 1\n",
            "rollout.rollout_batch_sise: unknown setting; did you mean rollout_batch_size?",
        ),
        ("[roll]\nx = 1\n", "roll: unknown setting; did you mean rollout?"),
        ("[rollout]\nzzz = 1\n", "rollout.zzz: unknown setting; known here: abort_grace_seconds"),
        (
            '[[prompts.environments]]\nid = "a/b"\nlevl = 1\n',
            "prompts.environments.0.levl: unknown setting; did you mean level?",
        ),
        ("[rollout]\nnum_rollout = 'three'\n", "rollout.num_rollout = 'three': input should be a valid integer"),
        ("[tracking]\ntrackers = 'wandb'\n", "tracking.trackers = 'wandb': input should be a list"),
        ("[rollout]\nnum_rollout = 2.0\n", "rollout.num_rollout = 2.0: input should be a valid integer"),
        ("[rollout]\nnum_rollout = true\n", "rollout.num_rollout = True: input should be a valid integer"),
        ("[rollout]\nnum_rollout = 0\n", "rollout.num_rollout = 0: input should be greater than or equal to 1"),
        ("[rollout]\ndeterministic = 1\n", "rollout.deterministic = 1: input should be a valid boolean"),
        ("[rollout]\nsurplus = 'burn'\n", "rollout.surplus = 'burn': input should be 'keep' or 'drop'"),
        ("rollout = 3\n", "rollout = 3: input should be a valid dictionary"),
        (
            "[sampling]\nrollout_temperature = 0.0\n",
            "sampling.rollout_temperature = 0.0: input should be greater than 0",
        ),
        ("[sampling]\nrollout_temperature = -1\n", "sampling.rollout_temperature = -1: input should be greater than 0"),
        ("[sampling]\nrollout_temperature = nan\n", "sampling.rollout_temperature = nan"),
        ("[sampling]\nrollout_top_p = 1.5\n", "sampling.rollout_top_p = 1.5: input should be less than or equal to 1"),
        ("[sampling]\nrollout_top_k = 0\n", "sampling.rollout_top_k: 0 keeps no token: use -1"),
        ("[sampling]\nrollout_stop = ['']\n", "sampling.rollout_stop: an empty string would stop everything"),
        ("[engine]\ndevice = 'gpu'\n", "engine.device: 'gpu' is not a device: write cpu, or cuda:0 for the first GPU"),
        ("[engine]\nkernels = 'fast'\n", "engine.kernels = 'fast': input should be 'auto', 'native' or 'torch'"),
        ("[engine]\nprecision = 'int4'\n", "engine.precision = 'int4': input should be 'auto', 'fp32', 'bf16'"),
        ("[engine]\nthreads = -1\n", "engine.threads = -1: input should be greater than or equal to 0"),
        ("[[prompts.datasets]]\n", "prompts.datasets.0.path: is required; add it"),
    ],
)
def test_a_wrong_setting_is_refused_with_key_value_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert f"{tmp_path}/run.toml: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts: add"),
        (MINIMAL + "[plugins]\nprompt_source = 'a:b'\n", "plugins.prompt_source replaces"),
        (MINIMAL + MINIMAL, "'core/copy_text@0' is listed twice"),
        (MINIMAL + "[rollout]\nover_sampling_batch_size = 8\nover_sampling_factor = 2.0\n", "set one of them"),
        (
            MINIMAL + "[rollout]\nover_sampling_batch_size = 2\n",
            "over_sampling_batch_size = 2 is below rollout_batch_size = 4",
        ),
        (MINIMAL + "[rollout]\nrefill_granularity = 9\n", "refill_granularity = 9 is above the 4 prompts"),
        (
            MINIMAL + "[sampling]\nmin_new_tokens = 500\n",
            "min_new_tokens = 500 is above rollout_max_response_len = 128",
        ),
        (MINIMAL + "[sampling]\nrollout_max_context_len = 100\n", "rollout_max_context_len = 100 leaves no room"),
        (MINIMAL + "[sampling]\nrollout_max_context_len = 4096\n", "is above engine.context_length = 512"),
        (MINIMAL + "[sampling]\nrollout_max_response_len = 512\n", "leaves no room for a prompt"),
        (MINIMAL + "[prompts]\nrollout_max_prompt_len = 500\n", "do not fit into 512 tokens"),
        (MINIMAL + "[plugins]\nreward = 'a:b'\ngroup_reward = 'a:b'\n", "reward and group_reward both score samples"),
    ],
)
def test_an_impossible_combination_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text.replace("[prompts]\nrollout_max", "[prompts]\nrollout_max"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_mistake_of_a_file_gets_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "sed = 1\n[rollout]\nnum_rollout = 0\n")
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such settings file"):
        RunSpec.load(tmp_path / "none.toml")


def test_a_folder_as_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        RunSpec.load(tmp_path)


def test_text_that_is_not_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2"):
        load(tmp_path, "seed = 1\n[rollout\n")


def test_values_that_are_nested_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(tmp_path, "seed = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="seed"):
        load(tmp_path, "", "seed=" + "[" * 100_000)


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"seed = \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        RunSpec.load(path)


def test_overrides_reach_nested_keys_and_lists(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        MINIMAL,
        "seed=7",
        "rollout.num_rollout=3",
        "prompts.environments.0.level=2",
        "model.checkpoint=some/folder",
        'sampling.rollout_stop=["\\n", "END"]',
        "rollout.over_sampling_factor=2",
    )
    assert settings.seed == 7
    assert settings.rollout.num_rollout == 3
    assert settings.prompts.environments[0].level == 2
    assert settings.model.checkpoint == "some/folder"
    assert settings.sampling.rollout_stop == ("\n", "END")
    assert settings.rollout.first_submission == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.num_rollout", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("seed.x=3", "'seed' is not a table"),
        ("prompts.environments.5.level=3", "'5' is not one of the 1 entries"),
        ("rollout.num_rolout=3", "did you mean num_rollout?"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "seed = 1\n" + MINIMAL, override)
    assert message in str(caught.value)


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = load(tmp_path, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 3  # type: ignore[misc]


def test_identity_leaves_out_what_may_change_between_continuations(tmp_path: Path) -> None:
    first, more = load(tmp_path, MINIMAL), load(tmp_path, MINIMAL, "rollout.num_rollout=99", "engine.threads=1")
    other = load(tmp_path, MINIMAL, "rollout.rollout_batch_size=2")
    assert first.identity() == more.identity()
    assert first.identity() != other.identity()


def test_how_failures_are_met_may_change_between_continuations(tmp_path: Path) -> None:
    names = ("budget=0.5", "window=100", "minimum=3", "retries=9")
    overrides = [*(f"rollout.failure_{name}" for name in names), "rollout.group_failure='refill'"]
    assert load(tmp_path, MINIMAL).identity() == load(tmp_path, MINIMAL, *overrides).identity()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.failure_budget=16", "16 is a count, and this is a share of the last failure_window rollouts"),
        ("rollout.failure_budget=-0.1", "rollout.failure_budget = -0.1"),
        ("rollout.failure_window=8", "failure_minimum = 16 is above failure_window = 8"),
    ],
)
def test_a_failure_budget_that_means_nothing_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("count", "share", "minimum"), [(16, 0.1, 17), (0, 0.0, 1), (3, 0.1, 4), (1_000_000_000, 0.1, 512)]
)
def test_a_stored_count_of_failures_is_read_as_the_fewest_that_matter(
    tmp_path: Path, count: int, share: float, minimum: int
) -> None:
    tree = load(tmp_path, MINIMAL).model_dump(mode="json")
    tree["rollout"]["failure_budget"] = count
    for name in ("failure_window", "failure_minimum"):
        del tree["rollout"][name]
    rollout = read_stored(tree, where="stored").rollout
    assert (rollout.failure_budget, rollout.failure_minimum) == (share, minimum)
    changed = read_stored(tree, where="stored", overrides=["rollout.failure_budget=0.3"]).rollout
    assert (changed.failure_budget, changed.failure_minimum) == (0.3, minimum)


def stored_before_one_registry(tmp_path: Path, *, estimator: str, divide_by_std: bool) -> dict[str, Any]:
    """Return settings as a run stored them when the trainer had an estimator of its own."""
    tree = load(tmp_path, MINIMAL).model_dump(mode="json")
    tree["advantage"] = {"divide_by_std": divide_by_std}
    tree["train"]["advantage"] = estimator
    return tree


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out"])
def test_a_stored_estimator_of_the_trainer_is_read_and_gone_on_with(tmp_path: Path, estimator: str) -> None:
    tree = stored_before_one_registry(tmp_path, estimator=estimator, divide_by_std=False)
    assert read_stored(tree, where="stored").advantage.estimator == estimator
    assert stored_identity(tree) == load(tmp_path, MINIMAL, f"advantage.estimator={estimator}").identity()


@pytest.mark.parametrize(
    ("estimator", "divide_by_std", "overrides", "reason"),
    [
        ("group_mean", True, ["advantage.divide_by_std=true"], "the standard deviation of n instead of n - 1"),
        ("reinforce_pp", False, ["advantage.estimator=reinforce_pp"], "over rollouts instead of tokens"),
    ],
)
def test_a_stored_run_whose_advantages_had_another_definition_is_read_and_not_gone_on_with(
    tmp_path: Path, estimator: str, divide_by_std: bool, overrides: list[str], reason: str
) -> None:
    tree = stored_before_one_registry(tmp_path, estimator=estimator, divide_by_std=divide_by_std)
    now = load(tmp_path, MINIMAL, *overrides)
    assert read_stored(tree, where="stored") == now
    differences = {key: value for key, value in stored_identity(tree).items() if value != now.identity()[key]}
    assert [reason in value for value in differences.values()] == [True]
    assert stored_values(tree).items() >= differences.items()  # so that a change on purpose is told as one


def test_threads_matter_to_a_deterministic_run(tmp_path: Path) -> None:
    one, two = (load(tmp_path, MINIMAL, "rollout.deterministic=true", f"engine.threads={n}") for n in (1, 2))
    assert one.identity() != two.identity()


@pytest.mark.parametrize(
    ("tables", "is_told"),
    [
        ({"reward": {"override_environments": True}, "plugins": {"reward": "mine:score"}}, False),
        ({"plugins": {"group_reward": "mine:score"}}, True),
        ({}, False),
    ],
)
def test_a_run_from_before_environments_verified_their_own_is_gone_on_with_as_it_was(tables, is_told) -> None:
    settings = Settings(prompts={"environments": [{"id": "core/add_numbers"}]}, **tables)
    assert ("reward.override_environments" in settings.identity()) is is_told
    assert "reward.concurrency" not in settings.identity()
