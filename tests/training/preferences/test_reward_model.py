from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification

from rollfeed.batch import equal_advantages
from rollfeed.config import TinyModelSettings
from rollfeed.config.train import TrainSettings
from rollfeed.conversations.pairs import PAIR, preference_prompt
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.errors import CheckpointError, ConfigError, DataError
from rollfeed.testing import CharTokenizer, group_of, make_prompt, sample_of
from rollfeed.training.preferences.reward_model import RewardModelTrainer
from rollfeed.types import TrainBatch

PAIRS = [([3, 4], [5, 0], [6, 7, 8, 0], 0.0), ([9], [3, 3, 0], [4, 0], 0.5), ([5, 6, 7], [8, 0], [9, 0], 0.0)]


def trainer_of(tmp_path: Path, **settings: object) -> RewardModelTrainer:
    tiny = TinyModelSettings(characters="abcdefghij", hidden_size=16, num_layers=1, num_heads=2)
    folder = tiny_checkpoint(tiny, seed=3, cache_directory=tmp_path / "models")
    made = TrainSettings(kind="reward_model", threads=1, device="cpu", **settings)
    trainer = RewardModelTrainer(folder, settings=made, temperature=1.0, num_batches=4, max_response_length=8)
    with torch.no_grad():
        head = trainer.policy.model.score.weight
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(1)))
    return trainer


def batch() -> TrainBatch:
    groups = []
    for number, (prompt_ids, chosen, rejected, margin) in enumerate(PAIRS):
        pair = {"chosen": "", "rejected": "", "margin": margin}
        prompt = make_prompt(token_ids=np.array(prompt_ids, np.int32), metadata={PAIR: pair})
        samples = [
            sample_of(prompt_ids, ids, reward=reward, index=place, rollout_id=place, group_index=number)
            for place, (ids, reward) in enumerate([(chosen, 1.0), (rejected, 0.0)])
        ]
        groups.append(group_of(samples, prompt=prompt))
    advantages = np.concatenate([equal_advantages(np.array([1.0, 0.0]), group=group) for group in groups])
    return TrainBatch(
        step=0, policy_version=0, groups=tuple(groups), advantages_S=advantages.astype(np.float32), metrics={}
    )


def reference(trainer: RewardModelTrainer) -> tuple[float, torch.Tensor]:
    """The loss over whole texts one by one in float64, and its gradient of the head."""
    model = trainer.policy.model
    model.double()
    losses = []
    for prompt_ids, chosen, rejected, margin in PAIRS:
        better, worse = (
            model.score(model.model(input_ids=torch.tensor([[*prompt_ids, *ids]])).last_hidden_state[0, -1])[0]
            for ids in (chosen, rejected)
        )
        losses.append(torch.log1p(torch.exp(-(better - worse - margin))))
    loss = torch.stack(losses).mean()
    (gradient,) = torch.autograd.grad(loss, model.score.weight)
    model.float()
    return float(loss.detach()), gradient


@pytest.mark.parametrize("budget", [10, 4096])
def test_loss_and_gradient_are_those_of_bradley_and_terry(tmp_path: Path, budget: int) -> None:
    trainer = trainer_of(tmp_path, micro_batch_tokens=budget + 2)
    loss, gradient = reference(trainer)
    before = trainer.policy.model.score.weight.detach().clone()
    report = trainer.train_step(batch())
    assert report.metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert report.metrics["train/micro_batches"] == (3.0 if budget == 10 else 1.0)
    moved = trainer.policy.model.score.weight.detach() - before
    clear = gradient.abs() > 1e-4  # AdamW's first step goes against the gradient's sign
    assert torch.equal(torch.sign(moved)[clear], -torch.sign(gradient).float()[clear])


def test_a_pair_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise it to twice that"):
        trainer_of(tmp_path, micro_batch_tokens=8).train_step(batch())


def two_labels(folder: Path, tmp_path: Path) -> Path:
    """A classifier of two labels."""
    made = tmp_path / "two"
    made.mkdir()
    about = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    about |= {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    (made / "config.json").write_text(json.dumps(about))
    weights = load_file(folder / "model.safetensors") | {"score.weight": np.ones((2, 16), np.float32)}
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def encoder(folder: Path, tmp_path: Path) -> Path:
    """A classifier that pools what it makes of a text."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=16, num_labels=1, **sizes)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("make", [two_labels, encoder])
def test_a_classifier_that_pairs_cannot_teach_is_refused_before_training(
    tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    tiny = TinyModelSettings(characters="abcdefghij", hidden_size=16, num_layers=1, num_heads=2)
    folder = make(tiny_checkpoint(tiny, seed=3, cache_directory=tmp_path / "models"), tmp_path)
    settings = TrainSettings(kind="reward_model", threads=1, device="cpu")
    with pytest.raises(CheckpointError, match="a reward model of pairs has one label"):
        RewardModelTrainer(folder, settings=settings, temperature=1.0, num_batches=4, max_response_length=8)


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), "1", True])
def test_a_margin_is_a_finite_number(margin: object) -> None:
    prompt = make_prompt("q", metadata={"chosen": "a", "rejected": "b", "margin": margin})
    keys = {"chosen_key": "chosen", "rejected_key": "rejected", "margin_key": "margin"}
    with pytest.raises(DataError, match="a margin is a finite number"):
        preference_prompt(prompt, tokenizer=CharTokenizer(), **keys)
