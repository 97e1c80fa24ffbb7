"""Adapters of peft: trained alone, merged where they are published, and saved as peft saves them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from pydantic import ValidationError

from rollfeed.config.train import TrainSettings
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files.low_rank import PastAdapter, adapted_layers, without_adapter
from rollfeed.training.model import Policy
from rollfeed.training.probe import rounding_of, score_texts
from rollfeed.training.ranks import empty_copy
from rollfeed.weights import write_checkpoint

LORA = {"rank": 4, "alpha": 8}


def logprobs_of(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0].float(), -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def texts_of(batch) -> list[np.ndarray]:
    return [sample.token_ids for sample in batch.samples if sample.response_length][:4]


@pytest.fixture(scope="module")
def bf16_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model stored in bf16, with biases and a head of its own."""
    config = transformers.AutoConfig.from_pretrained(tiny_checkpoint)
    config.tie_word_embeddings, config.attention_bias = False, True
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("lora") / "bf16"
    model.save_pretrained(folder)
    return folder


def own(trainer) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in trainer.adapter.adapter().items()}


def test_only_the_adapter_is_trained_and_its_start_is_the_model(
    make_trainer, tiny_checkpoint, batch_by_seed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rollfeed.model_files.low_rank")
    trainer, full = make_trainer(lora=LORA), make_trainer()
    num_trained = sum(each.numel() for each in own(trainer).values())
    assert f"train.lora: {num_trained:,} parameters are trained, " in caplog.text
    batch = batch_by_seed(1)
    for before, after in zip(full.logprobs(batch.samples), trainer.logprobs(batch.samples), strict=True):
        np.testing.assert_array_equal(before, after)
    report = trainer.train_step(batch)
    assert report.num_updates == 1
    assert report.metrics["train/grad_norm"] > 0
    model = trainer.policy.model
    stored = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).state_dict()
    kept = {
        name.replace(".base_layer.", "."): each for name, each in model.state_dict().items() if ".lora_" not in name
    }
    assert all(torch.equal(kept[name], each) for name, each in stored.items())
    assert any(bool(layer.lora_B["default"].weight.any()) for layer in adapted_layers(model))
    assert all("lora_" in name for name in trainer.state_dict().tensors if name.startswith(("model/", "exp_avg")))


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_offload": True, "micro_batch_tokens": 64},
        {"share_prompts": False, "micro_batch_tokens": 64},
    ],
)
def test_an_adapter_is_trained_alike_however_passes_are_made(options, make_trainer, batch_by_seed) -> None:
    batch, found = batch_by_seed(1), []
    for each in ({}, options):
        # With this epsilon an update is nearly the gradient, of which small differences stay small.
        trainer = make_trainer(lora=LORA, optimizer={"learning_rate": 1e-1, "epsilon": 1.0}, **each)
        start = own(trainer)
        trainer.train_step(batch)
        found.append({name: tensor - start[name] for name, tensor in own(trainer).items()})
    moved = max(float(each.abs().max()) for each in found[0].values())
    for name, each in found[0].items():
        torch.testing.assert_close(found[1][name], each, rtol=0.0, atol=1e-4 * moved)


def test_merged_weights_say_what_the_trainer_says(make_trainer, tiny_checkpoint, batch_by_seed, tmp_path) -> None:
    trainer, batch = make_trainer(lora=LORA), batch_by_seed(1)
    trainer.train_step(batch)
    write_checkpoint(trainer.weights(), tmp_path / "merged", checkpoint=tiny_checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    texts = texts_of(batch)
    said = torch.from_numpy(score_texts(trainer.policy, texts, rounding=None, micro_batch_tokens=512))
    # The folder has the checkpoint's type, so that values differ by its rounding.
    merged, before = (torch.cat([logprobs_of(each, text) for text in texts]).double() for each in (model, base))
    assert (merged - said).abs().max() < 0.1 * (before - said).abs().max()


def test_what_is_rounded_is_the_merged_weight(make_trainer, tiny_checkpoint, batch_by_seed) -> None:
    trainer, batch = make_trainer(lora=LORA), batch_by_seed(1)
    trainer.train_step(batch)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    rounded = {name: each.to(torch.bfloat16).float() for name, each in trainer.weights().items()}
    model.load_state_dict(rounded, strict=False)
    texts = texts_of(batch)
    rounding = rounding_of("bfloat16", to_int8=lambda weight: weight)
    said = score_texts(trainer.policy, texts, rounding=rounding, micro_batch_tokens=512)
    np.testing.assert_allclose(said, torch.cat([logprobs_of(model, text) for text in texts]).double(), atol=2e-5)
    assert all(not layer.disable_adapters for layer in adapted_layers(trainer.policy.model))


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("name", ["published", "bfloat16"])
def test_a_copy_without_weights_says_what_an_adapted_model_says(name, merges, make_trainer, batch_by_seed) -> None:
    trainer, batch = make_trainer(lora=LORA), batch_by_seed(1)
    copy = Policy(empty_copy(trainer.policy.model), temperature=1.0, head_shape=trainer.policy.head_shape)
    copy.device = trainer.device
    trainer.train_step(batch)
    rounding = rounding_of(name, to_int8=lambda weight: weight)
    options = {"rounding": rounding, "micro_batch_tokens": 512, "merges": merges}
    said, theirs = (score_texts(each, texts_of(batch), **options) for each in (copy, trainer.policy))
    np.testing.assert_array_equal(said, theirs)
    assert all(each.is_meta for each in copy.model.parameters())


def test_the_base_of_bf16_passes_is_held_in_bf16_and_all_else_is_equal(
    make_trainer, bf16_checkpoint, batch_by_seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, options = (
        [batch_by_seed(seed) for seed in range(3)],
        {
            "checkpoint": bf16_checkpoint,
            "lora": {**LORA, "target_modules": ["q_proj", "down_proj"]},
            "precision": "bf16",
            "loss": {"kl_coefficient": 0.1},
        },
    )
    held = make_trainer(**options)
    with monkeypatch.context() as patch:
        patch.setattr("rollfeed.training.trainer.hold_linear_layers_as_computed", lambda *args, **options: None)
        wide = make_trainer(**options)
    theirs, ours = (dict(each.policy.model.named_parameters()) for each in (wide, held))
    assert {each.dtype for each in theirs.values()} == {torch.float32}
    narrow = {name for name, each in ours.items() if each.dtype is torch.bfloat16}
    assert narrow == {name for name in ours if ("_proj." in name or "lm_head" in name) and ".lora_" not in name}
    assert sum(ours[name].nbytes for name in narrow) * 2 == sum(theirs[name].nbytes for name in narrow)
    for batch in batches:
        reports = [{**trainer.train_step(batch).metrics} for trainer in (wide, held)]
        assert reports[0] == reports[1]
    assert reports[0]["train/reference_kl"] > 0
    for before, after in zip(wide.logprobs(batches[0].samples), held.logprobs(batches[0].samples), strict=True):
        np.testing.assert_array_equal(before, after)
    expected, found = (each.state_dict().tensors for each in (wide, held))
    assert all(torch.equal(each, found[name]) for name, each in expected.items())
    published = held.weights()
    assert {each.dtype for each in published.values()} == {torch.float32}
    assert all(torch.equal(each, published[name]) for name, each in wide.weights().items())
    texts = texts_of(batches[0])
    for name in ("published", "bfloat16", "int8"):
        rounding = rounding_of(name, to_int8=lambda weight: weight.mul(64).round().div(64))
        said = [score_texts(each.policy, texts, rounding=rounding, micro_batch_tokens=512) for each in (wide, held)]
        np.testing.assert_array_equal(*said)
    assert {name for name, each in ours.items() if each.dtype is torch.bfloat16} == narrow


def test_a_base_that_bf16_cannot_hold_stays_in_fp32(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer(lora=LORA, precision="bf16")  # the checkpoint is in fp32
    assert {each.dtype for each in trainer.policy.model.parameters()} == {torch.float32}
    assert trainer.train_step(batch_by_seed(1)).num_updates == 1


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers so
def test_an_adapter_loads_in_peft(make_trainer, tiny_checkpoint, batch_by_seed, tmp_path) -> None:
    trainer, batch = make_trainer(lora={**LORA, "target_modules": ["q_proj", "down_proj"]}), batch_by_seed(1)
    trainer.train_step(batch)
    trainer.adapter.write_adapter(tmp_path / "adapter", base=tiny_checkpoint)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(tiny_checkpoint))
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    texts = texts_of(batch)
    said = score_texts(trainer.policy, texts, rounding=None, micro_batch_tokens=512)
    by_peft = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32), tmp_path / "adapter"
    )
    by_transformers = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    by_transformers.load_adapter(str(tmp_path / "adapter"))
    for model in (by_peft, by_transformers):
        found = torch.cat([logprobs_of(model.eval(), text) for text in texts]).double()
        np.testing.assert_allclose(found, said, atol=2e-5)


def test_the_reference_is_the_model_without_the_adapter(make_trainer, batch_by_seed) -> None:
    batch, loss = batch_by_seed(1), {"kl_coefficient": 0.5}
    trainer, two = make_trainer(lora=LORA, loss=loss), make_trainer(lora=LORA, loss=loss, reference=None)
    first = trainer.train_step(batch).metrics
    assert first["train/reference_kl"] == 0.0
    assert trainer.train_step(batch).metrics["train/reference_kl"] > 0
    # What the warm-up has made is what is kept to, once it has been taken.
    two.train_step(batch)
    two.take_as_reference()
    assert two.train_step(batch).metrics["train/reference_kl"] == 0.0
    assert two.train_step(batch).metrics["train/reference_kl"] > 0


def test_a_reference_of_its_own_is_another_model(make_trainer, tiny_checkpoint, batch_by_seed) -> None:
    loss, batches = {"kl_coefficient": 0.5}, [batch_by_seed(seed) for seed in range(3)]
    trainers = [make_trainer(lora=LORA, loss=loss, reference=each) for each in (None, tiny_checkpoint)]
    reports = [[trainer.train_step(batch).metrics for batch in batches] for trainer in trainers]
    assert [each["train/reference_kl"] for each in reports[0]] == pytest.approx(
        [each["train/reference_kl"] for each in reports[1]]
    )
    assert reports[0][2]["train/reference_kl"] > 0


def test_a_past_adapter_is_put_back_and_taken_away_again(make_trainer, batch_by_seed) -> None:
    trainer, batch = make_trainer(lora=LORA), batch_by_seed(1)
    past = PastAdapter(trainer.policy.model)
    start, texts = own(trainer), texts_of(batch)

    def said() -> list[float]:
        return score_texts(trainer.policy, texts, rounding=None, micro_batch_tokens=512).tolist()

    at_start = said()
    trainer.train_step(batch)
    at_one = said()
    with past.in_place():
        assert said() == at_start
    past.take()
    trainer.train_step(batch)
    assert said() != at_one
    with past.in_place():
        assert said() == at_one
    with without_adapter(trainer.policy.model):
        assert said() == at_start
    now = own(trainer)
    assert any(not torch.equal(now[name], start[name]) for name in start)
    trainer.train_step(batch)  # what learns has a gradient again
    assert any(not torch.equal(own(trainer)[name], now[name]) for name in now)


def test_a_resumed_training_is_equal_bit_by_bit(make_trainer, batch_by_seed, tmp_path) -> None:
    batches, loss = [batch_by_seed(seed) for seed in range(4)], {"kl_coefficient": 0.1}
    whole, first, second = (make_trainer(lora=LORA, loss=loss, num_epochs=2) for _ in range(3))
    for batch in batches:
        whole.train_step(batch)
    for batch in batches[:2]:
        first.train_step(batch)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for batch in batches[2:]:
        second.train_step(batch)
    assert second.step == 4
    assert all(torch.equal(each, second.weights()[name]) for name, each in whole.weights().items())
    assert all(torch.equal(each, own(second)[name]) for name, each in own(whole).items())


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (None, LORA, "of training all weights, and this is one of an adapter of rank 4"),
        (LORA, None, "of training an adapter of rank 4, and this is one of all weights"),
        ({**LORA, "rank": 8}, LORA, "an adapter with rank = 8, and this is one of an adapter with rank = 4"),
        ({**LORA, "alpha": 16}, LORA, "with alpha = 16"),
        ({**LORA, "target_modules": "q_proj"}, LORA, r"with target_modules = \['q_proj'\]"),
    ],
)
def test_a_state_of_another_adapter_is_refused(theirs, ours, said, make_trainer, batch_by_seed, tmp_path) -> None:
    other, trainer = make_trainer(lora=theirs), make_trainer(lora=ours)
    other.train_step(batch_by_seed(1))
    other.save(tmp_path / "state")
    before = {name: each.clone() for name, each in trainer.weights().items()}
    with pytest.raises(CheckpointError, match=said):
        trainer.load(tmp_path / "state")
    assert trainer.step == 0
    assert all(torch.equal(each, before[name]) for name, each in trainer.weights().items())


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("query", "'query': the model has no such module; linear layers are: down_proj, gate_proj, k_proj"),
        ("embed_tokens", "model.embed_tokens is none that is adapted"),
        ("lm_head", "lm_head is none that is adapted"),
        ("input_layernorm", "model.layers.0.input_layernorm is none that is adapted"),
    ],
)
def test_modules_that_are_not_there_are_refused_with_those_that_are(target, said, make_trainer) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trainer(lora={**LORA, "target_modules": ["q_proj", target]})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"freeze_params": ["embed"]}, "leave freeze_params out"),
        ({"kind": "reward_model"}, "has a head to train"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"lora": {"target_modules": []}}, "at least 1 item"),
        ({"lora": {"target_modules": ["all-linear", "q_proj"]}}, "'all-linear' are all of them: remove it, or the"),
    ],
)
def test_settings_that_do_not_go_with_an_adapter_are_refused(other, said) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainSettings(**{"lora": LORA, **other})


def test_without_peft_it_is_said_how_to_install_it(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollfeed\[lora\]'"):
        make_trainer(lora=LORA)


def test_a_checkpoint_on_disk_is_small(make_trainer, batch_by_seed, tmp_path: Path) -> None:
    sizes = []
    for number, lora in enumerate((None, LORA)):
        trainer = make_trainer(lora=lora)
        trainer.train_step(batch_by_seed(1))
        trainer.save(tmp_path / str(number))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(number)).iterdir()))
    assert sizes[1] < sizes[0] / 4
