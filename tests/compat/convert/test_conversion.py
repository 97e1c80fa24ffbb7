"""What a run of slime's does is what the settings say; flags that contradict each other are refused by name."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollfeed.compat.convert.conversion import Converted, convert_script
from rollfeed.compat.convert.flags_reference import with_tables
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError

BATCH = "--rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 3 --rollout-max-response-len 64"
DOCUMENT = Path(__file__).parents[3] / "docs" / "from-slime.md"


def converted(flags: str) -> Converted:
    return convert_script(f"{BATCH} {flags}", source="flags")


def value(flags: str, key: str) -> Any:
    setting = converted(flags).settings.get(key)
    return None if setting is None else setting.value


def reasons(flags: str) -> dict[str, str]:
    return {each.what.split()[0]: each.reason for each in converted(flags).left}


def test_defaults_that_differ_are_written_out() -> None:
    settings = converted("--prompt-data p.jsonl --eval-prompt-data aime a.jsonl").settings
    assert {key: setting.value for key, setting in settings.items() if setting.origin == "slime's default"} == {
        "seed": 42,
        "prompts.datasets.0.input_key": "input",
        "prompts.datasets.0.metadata_key": "metadata",
        "prompts.datasets.0.tools_key": "tools",
        "prompts.datasets.0.apply_chat_template": False,
        "advantage.estimator": "group_mean",
        "advantage.divide_by_std": True,
        "eval.n_samples_per_prompt": 1,
        "eval.input_key": "input",
        "eval.metadata_key": "metadata",
        "eval.tools_key": "tools",
        "eval.apply_chat_template": False,
        "train.loss.clip_high": 0.2,
        "train.loss.dual_clip": 0.0,
        "train.loss.correction": "none",
        "train.loss.normalisation": "sequence",
        "train.optimizer.weight_decay": 0.01,
        "train.optimizer.max_grad_norm": 1.0,
        "train.optimizer.schedule": "linear",
    }


def test_an_adapter_is_one_of_its_rank_and_modules() -> None:
    keys = {"train.lora.rank": 8, "train.lora.alpha": 16, "train.lora.target_modules": ["all-linear"]}
    assert {key: value("--lora-rank 8", key) for key in keys} == keys
    flags = "--lora-rank 8 --lora-alpha 4 --target-modules q_proj,v_proj"
    assert [value(flags, key) for key in keys] == [8, 4, ["q_proj", "v_proj"]]
    of_megatron = "--lora-rank 8 --target-modules linear_qkv,linear_proj"
    assert value(of_megatron, "train.lora.target_modules") == ["all-linear"]
    assert "names of Megatron's layers" in reasons(of_megatron)["--target-modules"]
    for off in ("--lora-rank 0 --lora-alpha 4", "--lora-alpha 4"):
        assert not any(key.startswith("train.lora") for key in converted(off).settings)
        assert reasons(off)["--lora-alpha"] == "without --lora-rank all weights are trained"


def test_routing_that_is_replayed_is_that_of_the_engine() -> None:
    keys = ("train.routing_replay", "sampling.return_routed_experts")
    assert [value("--use-rollout-routing-replay", key) for key in keys] == [True, True]
    assert [value("--use-routing-replay", key) for key in keys] == [None, None]
    assert (
        "replays the engine's choices of experts, and no others"
        in reasons("--use-routing-replay")["--use-routing-replay"]
    )
    sft = "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout"
    flags = f"--rollout-batch-size 8 --num-rollout 3 --prompt-data p.jsonl {sft} --use-rollout-routing-replay"
    taught = convert_script(flags, source="flags")
    assert not taught.settings.keys() & set(keys)
    assert [each.reason for each in taught.left if "replay" in each.what] == ["in `sft` mode nothing is sampled"]


def test_columns_that_a_file_has_not_are_not_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"input": "a", "tools": []}) + "\n")
    settings = converted(f"--prompt-data {file}@[0:1]").settings
    assert "prompts.datasets.0.metadata_key" not in settings
    assert settings["prompts.datasets.0.tools_key"].value == "tools"


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        ("--partial-rollout", "rollout.mode", "partial"),
        ("--partial-rollout --mask-offpolicy-in-partial-rollout", "rollout.mask_offpolicy_finished_members", True),
        ("--fully-async --max-weight-staleness 2", "rollout.max_staleness", 2),
        (
            "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "rollout.mode",
            "async",
        ),
        ("--rollout-function-path my.rollout.generate", "plugins.rollout", "slime:my.rollout.generate"),
        ("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout", "plugins.rollout", None),
        ("--data-source-path slime.rollout.data_source.RolloutDataSourceWithBuffer", "plugins.prompt_source", None),
        ("--data-source-path my.data.Source --prompt-data p.jsonl", "plugins.prompt_source", "slime:my.data.Source"),
        ("--data-source-path my.data.Source --prompt-data p.jsonl", "prompts.datasets.0.path", None),
        ("--data-source-path my.data.Source --prompt-data p.jsonl", "plugins.slime_args.input_key", "input"),
        ("--custom-rm-path my.rm.score", "plugins.reward", "slime:my.rm.score"),
        ("--custom-rm-path my.rm.score --group-rm", "plugins.group_reward", "slime:my.rm.score"),
        ("--custom-generate-function-path my.gen.run", "plugins.generate", "slime:my.gen.run"),
        ("--rollout-sample-hook-path my.hook.run", "plugins.sample_hook", "slime:my.hook.run"),
        ("--custom-reward-post-process-path my.rm.post", "plugins.advantage", "slime:my.rm.post"),
        ("--dynamic-sampling-filter-path my.filters.f", "plugins.group_filters", ["slime:my.filters.f"]),
        ("--buffer-filter-path my.buffer.pick", "plugins.buffer_policy", "slime:my.buffer.pick"),
        ("--buffer-filter-path slime.rollout.data_source.pop_first", "buffer.policy", "fifo"),
        ("--num-epoch 2", "rollout.num_rollout", 3),
        (
            "--rollout-external-engine-addrs 10.0.0.1:30000 http://b:1",
            "engine.sglang.workers",
            ["http://10.0.0.1:30000", "http://b:1"],
        ),
        ("--sglang-router-ip 10.0.0.1 --sglang-router-port 3000", "engine.sglang.router", "http://10.0.0.1:3000"),
        ("--rm-type remote_rm --rm-url http://a:1/x", "reward.remote.max_tries", 10),
        ("--advantage-estimator gspo", "train.loss.ratio", "sequence"),
        ("--advantage-estimator cispo", "train.loss.objective", "cispo"),
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages", "advantage.estimator", "reinforce_pp"),
        ("--disable-grpo-std-normalization", "advantage.divide_by_std", False),
        ("--n-samples-per-prompt 1", "advantage.divide_by_std", False),
        ("--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl", "train.loss.kl_estimator", "k3"),
        ("--use-kl-loss --kl-loss-coef 0.01 --ref-update-interval 20", "train.loss.reference_refresh_interval", 20),
        ("--advantage-estimator reinforce_plus_plus --kl-coef 0.1", "train.loss.reward_kl_coefficient", 0.1),
        (
            "--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --kl-loss-type low_var_kl",
            "train.loss.reward_kl_estimator",
            "k3",
        ),
        ("--advantage-estimator grpo --kl-coef 0.1", "train.loss.reward_kl_coefficient", None),
        ("--use-tis --tis-clip 3", "train.loss.correction_high", 3.0),
        ("--eps-clip 0.1", "train.loss.clip_high", 0.1),
        ("--global-batch-size 16", "train.num_minibatches", 2),
        ("--debug-rollout-only --lr 1e-5", "train.optimizer.learning_rate", None),
        ("--calculate-per-token-loss", "train.loss.normalisation", "token"),
        ("--rollout-top-p 0.9 --rollout-top-k 50", "sampling.return_sampling_mask", True),
        ("--rollout-max-context-len 256 --rollout-max-prompt-len 200", "prompts.rollout_max_prompt_len", 192),
        ("--eval-prompt-data a.jsonl", "eval.datasets.0.name", "aime"),
        ("--eval-prompt-data a a.jsonl b b.jsonl", "eval.datasets.1.path", "b.jsonl"),
        ("--eval-prompt-data a a.jsonl --input-key question", "eval.input_key", "question"),
        ("--eval-prompt-data a a.jsonl --input-key question --eval-input-key prompt", "eval.input_key", "prompt"),
        ("--rollout-shuffle --rollout-seed=7", "seed", 7),
        ("--use-tensorboard --use-wandb", "tracking.trackers", ["wandb", "tensorboard"]),
        ("--use-wandb --wandb-project demo", "tracking.project", "demo"),
        ("--save-interval 20 --save-hf /models/{rollout_id}", "train.export_interval", 20),
    ],
)
def test_flags_become_the_settings_that_mean_the_same(flags: str, key: str, expected: Any) -> None:
    assert value(flags, key) == expected


def test_built_in_filters_are_ours() -> None:
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    tree = converted(f"--dynamic-sampling-filter-path {path}_with_fallback").tree
    assert tree["filters"]["dynamic_sampling"] == [{"name": "reward_std", "keep_when_short": True}]
    over = "slime.rollout.filter_hub.over_sampling_filters.sort_by_reward_std"
    tree = converted(f"--over-sampling-batch-size 16 --over-sampling-filter-path {over}").tree
    assert tree["filters"]["over_sampling"] == {"name": "reward_std"}


def test_epochs_end_a_run_that_has_no_number_of_steps() -> None:
    found = convert_script("--rollout-batch-size 8 --num-epoch 2 --prompt-data p.jsonl", source="flags")
    assert found.settings["prompts.num_epoch"].value == 2
    assert found.settings["rollout.num_rollout"].value == 100_000_000


def test_a_supervised_run_has_the_mode_and_nothing_that_samples() -> None:
    flags = (
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --lr 1e-5 "
        "--loss-mask-type qwen3 --rollout-batch-size 8 --num-epoch 3 --prompt-data chats.jsonl --input-key messages "
        "--calculate-per-token-loss --disable-compute-advantages-and-returns --eps-clip 0.3 "
        "--dynamic-sampling-filter-path my.filter"
    )
    found = convert_script(flags, source="flags")
    assert found.tree["rollout"]["mode"] == "sft"
    assert found.tree["rollout"]["loss_mask_type"] == "qwen3"
    assert found.tree["prompts"]["datasets"][0]["apply_chat_template"] is True
    assert found.tree["engine"]["context_length"] == 8192
    assert not {"filters", "advantage", "plugins"} & found.tree.keys()
    assert {each.what.split()[0] for each in found.left} >= {"--eps-clip", "--dynamic-sampling-filter-path"}
    validate_settings(found.tree, where="")


def test_a_custom_config_sets_flags_and_gives_plug_ins_what_it_adds(tmp_path: Path) -> None:
    file = tmp_path / "custom.yaml"
    file.write_text("rollout_temperature: 0.7\nmax_turns: 4\nlr: 1e-5\n")
    found = converted(f"--custom-config-path {file} --rollout-temperature 1.0")
    assert found.settings["sampling.rollout_temperature"].value == 0.7
    assert found.settings["train.optimizer.learning_rate"].value == 1e-5
    assert found.tree["plugins"]["slime_args"] == {"max_turns": 4}
    assert found.settings["plugins.slime_args.max_turns"].origin == f"{file}:2"


def test_flags_of_others_are_reported_with_what_they_are() -> None:
    found = reasons(
        "--sglang-mem-fraction-static 0.7 --tensor-model-parallel-size 2 --router-policy x --rolout-top-p 0.9"
    )
    assert "SGLang's server" in found["--sglang-mem-fraction-static"]
    assert "Megatron" in found["--tensor-model-parallel-size"]
    assert "router" in found["--router-policy"]
    assert "did you mean rollout-top-p?" in found["--rolout-top-p"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--over-sampling-batch-size 4", "--over-sampling-batch-size 4: is below --rollout-batch-size 8"),
        ("--num-steps-per-rollout 2 --global-batch-size 32", "--global-batch-size 32: .* are 16: remove one"),
        ("--debug-rollout-only --debug-train-only", "--debug-train-only: and --debug-rollout-only"),
        ("--rollout-max-context-len 64 --rollout-max-prompt-len 64", "--rollout-max-prompt-len 64: leaves no room"),
        ("--kl-coef 0.1 --kl-loss-coef 0.1", "--kl-coef 0.1: and --kl-loss-coef"),
        ("--use-tis --use-rollout-logprobs", "--use-tis: and --use-rollout-logprobs"),
        ("--rollout-temperature 0", "--rollout-temperature 0: must be above 0"),
        ("--fully-async --partial-rollout", "--fully-async: .* remove --partial-rollout"),
        ("--fully-async --pause-generation-mode abort", "--pause-generation-mode abort: would end"),
        ("--rollout-batch-size eight", "--rollout-batch-size eight: is not an integer"),
        ("--rollout-top-p", "--rollout-top-p: its value misses"),
        ("--partial-rollout=yes", "--partial-rollout yes: takes no value"),
        (
            "--rollout-top-p 1.5",
            "--rollout-top-p 1.5: sampling.rollout_top_p = 1.5: input should be less than or equal to 1",
        ),
        ("--apply-chat-template-kwargs {a:1}", "--apply-chat-template-kwargs {a:1}: is not JSON"),
        ("--eval-prompt-data a a.jsonl b", "--eval-prompt-data a a.jsonl b: must be names and paths in turn"),
        ("--partial-rollout 3", "'3' belongs to no flag"),
    ],
)
def test_wrong_flags_are_refused_in_one_line_that_names_them(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        converted(flags)
    assert "\n" not in str(refused.value)


def test_a_flag_in_a_script_is_refused_with_file_and_line(tmp_path: Path) -> None:
    script = "ARGS=(\n  --rollout-batch-size 8\n  --rollout-top-p 2\n)\npython train.py ${ARGS[@]}\n"
    with pytest.raises(ConfigError, match=r"^run\.sh:3: --rollout-top-p 2: sampling\.rollout_top_p"):
        convert_script(script, source="run.sh", folder=tmp_path)


def test_the_text_is_the_settings_with_where_each_comes_from() -> None:
    found = converted('--prompt-data \'a "b".jsonl\' --multimodal-keys \'{"image": "pictures"}\' --colocate')
    assert tomllib.loads(found.text()) == found.tree
    assert "rollout_batch_size = 8  # --rollout-batch-size 8" in found.text()
    assert "#   --colocate: GPUs and processes are not placed here" in found.text()


def test_a_key_is_not_written_out() -> None:
    text = convert_script("--use-wandb --wandb-key 0f1e2d3c", source="flags").text()
    assert "0f1e2d3c" not in text
    assert "--wandb-key <key>: put it into WANDB_API_KEY" in text


def test_the_page_has_the_tables_of_the_flags() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python -m rollfeed.compat.convert.flags_reference docs/from-slime.md"


RLVE = "--rlve --environment-list Sorting core/add_numbers --disable-rollout-global-dataset"


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        (RLVE, "prompts.adaptive.policy", "rlve"),
        (RLVE, "prompts.adaptive.environment_list", ["rlve/Sorting", "core/add_numbers"]),
        (RLVE, "prompts.adaptive.apply_chat_template", False),
        (f"{RLVE} --initial-difficulty 2", "prompts.adaptive.initial_difficulty", 2),
        (
            f"{RLVE} --min-metric-to-increase-difficulty 0.5",
            "prompts.adaptive.min_metric_to_increase_difficulty",
            0.5,
        ),
        (
            f"{RLVE} --custom-prompt-preprocessor TinyZero --answer-marker-type '<answer></answer>'",
            "prompts.adaptive.custom_prompt_preprocessor",
            "TinyZero",
        ),
        ("--rlve", "prompts.adaptive.policy", None),
        ("--environment-list Sorting", "prompts.adaptive.environment_list", None),
    ],
)
def test_environments_of_rlve_adapt_as_there(flags: str, key: str, expected: Any) -> None:
    assert value(flags, key) == expected


def test_a_style_that_does_not_go_with_the_template_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--custom-prompt-preprocessor TinyZero: .*apply_chat_template = false"):
        converted(f"{RLVE} --apply-chat-template --custom-prompt-preprocessor TinyZero")


SLIME_TEACHER = (
    "--use-opd --opd-type sglang --opd-kl-coef 0.5 --rm-url http://teacher:30000/generate "
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func "
    "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards"
)


def test_distillation_from_a_server_is_a_teacher_alone() -> None:
    found = converted(f"{SLIME_TEACHER} --prompt-data p.jsonl --rollout-temperature 0.7")
    assert found.tree["teacher"] == {
        "servers": ["http://teacher:30000"],
        "temperature": 1.0,
        "use": "loss",
        "coefficient": 0.5,
        "advantage_weight": 0.0,
    }
    assert not {"plugins", "remote"} & {part for key in found.settings for part in key.split(".")}
    assert set(reasons(SLIME_TEACHER)) == {"--custom-reward-post-process-path"}
    assert validate_settings(found.tree, where="converted").teacher is not None


def test_distillation_beside_rewards_adds_to_their_advantages() -> None:
    found = converted("--use-opd --opd-type megatron --opd-teacher-load /models/teacher --custom-rm-path mine.score")
    assert (found.tree["teacher"]["checkpoint"], found.tree["teacher"]["advantage_weight"]) == ("/models/teacher", 1.0)
    assert found.tree["plugins"]["reward"] == "slime:mine.score"
    assert any("Hugging Face layout" in note for note in found.notes)
    of_miles = converted("--use-opd --opd-teacher-urls math=http://a:1/generate --rm-type math")
    assert of_miles.tree["teacher"]["servers"] == ["http://a:1"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--use-opd --opd-type self --opd-teacher-load /m", "one, that sees what the policy does"),
        ("--use-opd --opd-teacher-urls a=http://a:1 b=http://b:1", "one, that sees what the policy does"),
        ("--use-opd --rm-url http://a:1 --rollout-top-p 0.9", "compared over the whole vocabulary"),
    ],
)
def test_a_teacher_that_cannot_be_had_is_reported(flags: str, reason: str) -> None:
    assert reason in reasons(flags)["--use-opd"]
    assert "teacher" not in converted(flags).tree
