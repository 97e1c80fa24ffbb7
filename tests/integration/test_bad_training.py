"""Mistakes around `rollfeed train`: found before anything starts where they can be, and no run is harmed by any."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REWARD = """
from pathlib import Path

def spread(sample, prompt):
    versions = {span.policy_version for span in sample.version_spans}
    is_broken = 2 in versions and not Path(__file__).with_name("healed").exists()
    return float(sample.response_token_ids.sum() % 7) * (1e37 if is_broken else 1.0)
"""
HOOK = """
from dataclasses import replace
from rollfeed.types import Picture

def add(sample, prompt):
    versions = {span.policy_version for span in sample.version_spans}
    shown = Picture(content_hash="ab", media_type="image/png", width=1, height=1)
    return replace(sample, images=(shown,)) if 2 in versions else sample
"""
SETTINGS = """
seed = 5

[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"

[rollout]
num_rollout = 4
rollout_batch_size = 2
n_samples_per_prompt = 4
deterministic = true

[sampling]
rollout_max_response_len = 8

[engine]
threads = 1
num_slots = 8
context_length = 256

[train]
checkpoint_interval = 1
micro_batch_tokens = 300

[train.optimizer]
learning_rate = 1e-3

[reward]
override_environments = true

[plugins]
reward = "breaking_reward:spread"
"""
EVAL = """
[[eval.datasets]]
path = "questions.jsonl"
rm_type = "exact"
"""


@pytest.fixture(scope="module")
def failed_run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a settings file and of `run`, which failed at batch 2 of 4: a gradient was not finite."""
    from rollfeed.cli.main import main

    folder = tmp_path_factory.mktemp("training")
    (folder / "breaking_reward.py").write_text(REWARD)
    (folder / "questions.jsonl").write_text(json.dumps({"prompt": "2 + 2?"}) + "\n")
    (folder / "train.toml").write_text(SETTINGS.format(checkpoint=tiny_checkpoint))
    (folder / "eval.toml").write_text(SETTINGS.format(checkpoint=tiny_checkpoint) + EVAL)
    assert main(["train", str(folder / "train.toml"), "--out", str(folder / "run"), "--quiet"]) == 1
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(failed_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(failed_run, tmp_path / "training")


def files(folder: Path) -> dict[str, bytes]:
    """Return what stands in each file; functions of one's own that were imported leave bytecode behind."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def refused(rollfeed, folder: Path, tmp_path: Path) -> Callable[..., None]:
    """Return a function that checks that `check` and `train` refuse in one line, in a new place and over a run."""

    def assert_refused(*expected: str, options: tuple[str, ...] = (), settings: str = "train.toml") -> None:
        before = files(folder)
        new, old = (tmp_path / "never",), (folder / "run", "--overwrite")
        for command, out in (("check", new), ("train", new), ("train", old)):
            result = rollfeed(command, folder / settings, "--out", *out, *options)
            assert result.code == 2, result.err
            lines = [line for line in result.err.splitlines() if line.startswith("rollfeed: ")]
            assert len(lines) == 1, result.err
            for part in expected:
                assert part in lines[0], lines[0]
            assert "Traceback" not in result.err
        assert not (tmp_path / "never").exists()
        assert files(folder) == before

    return assert_refused


def changed_model(tiny_checkpoint: Path, folder: Path, **config: object) -> Path:
    copy = shutil.copytree(tiny_checkpoint, folder / "model")
    stored = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**stored, **config}))
    return copy


def test_a_model_that_is_no_causal_language_model(refused, tiny_checkpoint, tmp_path) -> None:
    model = changed_model(tiny_checkpoint, tmp_path, architectures=["BertModel"], model_type="bert")
    option = ("--set", f"model.checkpoint={model}")
    refused(f"{model}/config.json: not a causal", "['BertModel']", "give model.checkpoint one", options=option)


def test_a_model_without_all_its_weights(rollfeed, folder: Path, tiny_checkpoint, tmp_path) -> None:
    model, before = changed_model(tiny_checkpoint, tmp_path, num_hidden_layers=3), files(folder)
    for out in ((tmp_path / "never",), (folder / "run", "--overwrite")):
        result = rollfeed("train", folder / "train.toml", "--out", *out, "--set", f"model.checkpoint={model}")
        assert result.code == 2
        assert f"rollfeed: {model}: weight 'model.layers.2." in result.err
        assert "is missing (9 are)" in result.err
    assert not (tmp_path / "never").exists()
    assert files(folder) == before


@pytest.mark.parametrize("special", [False, True])
def test_a_tokenizer_of_another_model(refused, tiny_checkpoint, tmp_path, special: bool) -> None:
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {
            "id": 259, "content": "<|think|>", "special": special,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
    )  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|think|>")
    option = ("--set", f"model.checkpoint={model}")
    expected = ("tokenizer.json: the tokenizer does not belong to the model", "'<|think|>' has id 259", "resize")
    refused(*expected, "vocab_size is 259", options=option)


def test_samples_that_fit_no_micro_batch(refused) -> None:
    option = ("--set", "train.micro_batch_tokens=200")
    expected = ("train.micro_batch_tokens = 200", "a prompt of 248 and a response of 8 tokens", "raise it to 255")
    refused(*expected, "or lower prompts.rollout_max_prompt_len", options=option)


def test_samples_of_a_generate_function_of_ones_own_that_fit_no_micro_batch(refused, folder: Path) -> None:
    text = "async def generate(request, *, services):\n    return await default(request)\n"
    (folder / "own_generation.py").write_text(text)
    options = ("--set", "plugins.generate=own_generation:generate", "--set", "prompts.rollout_max_prompt_len=80")
    expected = ("train.micro_batch_tokens = 99", "samples of 256 tokens", "lower sampling.rollout_max_context_len")
    refused(*expected, options=(*options, "--set", "train.micro_batch_tokens=99"))


def test_shorter_prompts_make_a_smaller_micro_batch_enough(rollfeed, folder: Path) -> None:
    options = ("--set", "train.micro_batch_tokens=71", "--set", "prompts.rollout_max_prompt_len=64")
    assert rollfeed("check", folder / "train.toml", *options).code == 0


def test_more_minibatches_than_groups(refused) -> None:
    expected = ("train.num_minibatches = 3", "rollout.rollout_batch_size = 2", "lower it")
    refused(*expected, options=("--set", "train.num_minibatches=3"))


def test_ratios_to_tokens_that_were_drawn_from_another_distribution(refused) -> None:
    options = ("--set", "sampling.rollout_top_p=0.95", "--set", "train.loss.old_logprobs=rollout")
    refused("train.loss.old_logprobs = 'rollout'", "with sampling.rollout_top_p = 0.95", options=options)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("rollout.mode=partial", "rollout.mode = partial: tokens weigh "),
        ("sampling.rollout_top_k=20", "sampling.rollout_top_k = 20: "),
    ],
)
def test_check_says_what_becomes_of_stale_and_of_restricted_rollouts(rollfeed, folder, option: str, said: str) -> None:
    result = rollfeed("check", folder / "train.toml", "--set", option)
    assert result.code == 0
    assert [line for line in result.err.splitlines() if line.startswith(said)], result.err


def test_an_eval_set_without_labels(refused) -> None:
    expected = ("eval set questions, prompt questions/0: has no label", "'exact' needs one", "set label_key of the set")
    refused(*expected, settings="eval.toml")


def test_a_device_that_is_not_there(refused) -> None:
    refused("train.device = 'cuda:77'", "try 'auto' or 'cpu'", options=("--set", "train.device='cuda:77'"))


@pytest.mark.parametrize(
    ("key", "value", "there"),
    [
        ("train.num_minibatches", "2", "1 there, 2 here"),
        ("rollout.surplus", "drop", '"keep" there, "drop" here'),
        ("engine.num_slots", "4", "8 there, 4 here"),
    ],
)
def test_a_run_is_not_gone_on_with_under_other_settings(rollfeed, folder, key: str, value: str, there: str) -> None:
    before = files(folder)
    for command in ("check", "train"):
        result = rollfeed(command, folder / "train.toml", "--out", folder / "run", "--set", f"{key}={value}")
        assert result.code == 2
        assert f"holds an unfinished run with other settings: {key} = {there}; choose another --out" in result.err
        assert f"({key} decides " in result.err
    assert files(folder) == before


def test_a_damaged_checkpoint_is_refused(rollfeed, folder: Path) -> None:
    newest = sorted((folder / "run" / "checkpoints").iterdir())[-1]
    tensors = newest / "trainer.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    before = files(folder)
    result = rollfeed("train", folder / "train.toml", "--out", folder / "run")
    assert result.code == 2
    assert f"{tensors}: is damaged: it has " in result.err
    assert f"move {newest} away, and an earlier state is gone on from" in result.err
    assert files(folder) == before


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_training_that_fails_between_two_updates_of_a_batch_says_what_is_kept(rollfeed, folder: Path) -> None:
    """The second group of a batch is a mini-batch of its own; after the first batch its gradient is not finite."""
    own = REWARD.replace("2 in versions", "1 in versions and sample.group_index % 2 == 1")
    (folder / "half_breaking.py").write_text(own)
    options = ("--set", "plugins.reward=half_breaking:spread", "--set", "train.num_minibatches=2")
    result = rollfeed("train", folder / "train.toml", "--out", folder / "half", *options)
    assert result.code == 1
    assert "rollfeed: step 1, update 3: the gradient of " in result.err
    assert "nothing was changed" not in result.err
    newest = folder / "half" / "checkpoints" / "step-000000"
    said = "1 update of this batch had been made before, which no checkpoint holds"
    assert said in result.err
    assert f"; the training goes on at step 1 from {newest}" in result.err
    assert [path.name for path in newest.parent.iterdir()] == [newest.name]


def test_a_gradient_that_is_not_finite_ends_the_run_and_leaves_the_checkpoints(rollfeed, folder: Path) -> None:
    checkpoints = files(folder / "run" / "checkpoints")
    assert sorted({name.partition("/")[0] for name in checkpoints}) == ["step-000000", "step-000001"]
    again = rollfeed("train", folder / "train.toml", "--out", folder / "run")
    assert again.code == 1
    assert "rollfeed: step 2, update 2: the gradient of " in again.err
    assert "is not finite; nothing was changed (train.on_non_finite = 'skip' leaves such updates out)" in again.err
    assert files(folder / "run" / "checkpoints") == checkpoints
    (folder / "healed").touch()
    resumed = rollfeed("train", folder / "train.toml", "--out", folder / "run", "--json")
    assert resumed.code == 0, resumed.err
    assert (resumed.json["num_steps"], resumed.json["num_resumed_steps"]) == (4, 2)
    assert [step["train/skipped_updates"] for step in lines(folder / "run" / "train.jsonl")] == [0, 0, 0, 0]


def test_samples_that_cannot_be_trained_on_fail_the_run_and_leave_the_checkpoints(rollfeed, folder: Path) -> None:
    (folder / "picture_hook.py").write_text(HOOK)
    (folder / "healed").touch()
    out, options = folder / "other", ("--set", "plugins.sample_hook=picture_hook:add")
    result = rollfeed("train", folder / "train.toml", "--out", out, *options)
    assert result.code == 1, result.err
    assert "rollfeed: step 2: it cannot be trained on: sample" in result.err
    assert "has pictures, and the model that is trained takes text only" in result.err
    before = files(out / "checkpoints")
    assert sorted({name.partition("/")[0] for name in before}) == ["step-000000", "step-000001"]
    assert rollfeed("train", folder / "train.toml", "--out", out, *options).code == 1
    assert files(out / "checkpoints") == before


def test_by_policy_the_step_is_left_out_and_the_run_goes_on(rollfeed, folder: Path) -> None:
    option = ("--set", "train.on_non_finite=skip")
    resumed = rollfeed("train", folder / "train.toml", "--out", folder / "run", *option)
    assert resumed.code == 0, resumed.err
    assert "step 2, update 2: the gradient of " in resumed.err
    assert "is not finite: left out" in resumed.err
    steps = lines(folder / "run" / "train.jsonl")
    assert [step["train/skipped_updates"] for step in steps] == [0, 0, 1, 0]
    assert [step["train/updates"] for step in steps] == [1, 1, 0, 1]


def test_check_says_what_the_file_is_for(rollfeed, folder: Path) -> None:
    assert rollfeed("check", folder / "train.toml", "--json").json["trains"] is True
    text = (folder / "train.toml").read_text()
    start, end = text.index("[train]"), text.index("[plugins]")
    (folder / "run.toml").write_text(text[:start] + text[end:])
    options = ("--set", "prompts.rollout_max_prompt_len=200")
    assert rollfeed("check", folder / "run.toml", "--json", *options).json["trains"] is False


def test_check_of_a_file_that_is_only_evaluated(rollfeed, folder: Path) -> None:
    text = (folder / "eval.toml").read_text().replace('[[prompts.environments]]\nid = "core/copy_text"\n', "")
    (folder / "only.toml").write_text(text.replace('[plugins]\nreward = "breaking_reward:spread"\n', ""))
    refused = rollfeed("check", folder / "only.toml")
    assert refused.code == 2
    assert "eval set questions, prompt questions/0: has no label" in refused.err
    checked = rollfeed("check", folder / "only.toml", "--set", "eval.datasets.0.rm_type=random", "--json")
    assert checked.code == 0, checked.err
    assert (checked.json["sources"], checked.json["eval_sets"], checked.json["num_rollout"]) == ([], ["questions"], 0)
    text = rollfeed("check", folder / "only.toml", "--set", "eval.datasets.0.rm_type=random").out
    assert text.splitlines()[2:] == [
        "template turns end with <|im_end|>; earlier turns stay as they were said",
        "eval     questions (1 prompt)",
        "steps    none: without prompts there is only rollfeed eval",
    ]
    refusing = ("--set", "eval.datasets.0.rm_type=random", "--set", "rollout.rewritten_turns=refuse")
    assert rollfeed("check", folder / "only.toml", *refusing).code == 0
    for command in ("run", "train"):
        result = rollfeed(command, folder / "only.toml", "--out", folder / "never")
        assert result.code == 2
        assert "no prompt source: name at least one data set or environment" in result.err
    assert not (folder / "never").exists()
