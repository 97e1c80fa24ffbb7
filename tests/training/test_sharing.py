"""When a prompt is computed once for its responses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollfeed.config.train import TrainSettings
from rollfeed.errors import CheckpointError
from rollfeed.training.packing import LONGEST_TREE
from rollfeed.training.sharing import refusal_to_share
from rollfeed.training.trainer import Trainer

SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LIKE_LLAMA = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def trainer_of(tmp_path: Path) -> MakeTrainer:
    """Return the trainer of a model with random weights."""

    def make(config: Any, **settings: Any) -> Trainer:
        torch.manual_seed(1)
        config.initializer_range = 0.3
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / "model")
        return Trainer(
            tmp_path / "model",
            settings=TrainSettings(**{"device": "cpu", "threads": 1, **settings}),
            temperature=1.0,
            num_batches=1,
            max_response_length=16,
        )

    return make


@pytest.mark.parametrize(
    ("window", "shares"), [(8, False), (300, False), (LONGEST_TREE - 1, False), (LONGEST_TREE, True), (None, True)]
)
def test_a_window_that_a_row_with_branches_can_be_longer_than_keeps_prompts_apart(
    window: int | None, shares: bool, trainer_of: MakeTrainer
) -> None:
    config = transformers.MistralConfig(**LIKE_LLAMA, sliding_window=window, max_position_embeddings=4096)
    assert trainer_of(config).shares_prompts == shares


def test_a_window_that_no_layer_uses_is_none(trainer_of: MakeTrainer) -> None:
    assert trainer_of(transformers.Qwen2Config(**LIKE_LLAMA, sliding_window=8, use_sliding_window=False)).shares_prompts


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=1, state_size=4),
        transformers.BloomConfig(vocab_size=259, hidden_size=32, n_layer=1, n_head=4),
    ],
    ids=lambda config: str(config.model_type),
)
def test_what_goes_by_the_place_in_a_row_keeps_prompts_apart_and_is_told_of(
    config: Any, trainer_of: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="rollfeed"):
        assert not trainer_of(config).shares_prompts
    assert len([message for message in caplog.messages if "train.share_prompts" in message]) == 1


@pytest.mark.parametrize("window", [20, 700])
def test_a_window_that_the_configuration_does_not_name_is_found_by_trying(window: int, trainer_of: MakeTrainer) -> None:
    trainer = trainer_of(
        transformers.GPTNeoConfig(
            vocab_size=259,
            hidden_size=32,
            num_layers=1,
            num_heads=4,
            attention_types=[[["local"], 1]],
            window_size=window,
        )
    )
    trainer.policy.model.config.window_size = 0
    reason = refusal_to_share(trainer.policy, longest=LONGEST_TREE)
    assert reason == "in a row with branches it says something else of a response than alone"


def test_no_note_where_sharing_was_not_asked_for(trainer_of: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rollfeed"):
        assert not trainer_of(
            transformers.MistralConfig(**LIKE_LLAMA, sliding_window=4), share_prompts=False
        ).shares_prompts
    assert not caplog.messages


def test_rows_with_branches_have_no_more_places_than_the_model(
    trainer_of: MakeTrainer, sample_of, group_of, batch_of
) -> None:
    # 6 branches of 12 tokens in one row would have 82 places, of which a model of 40 positions knows nothing.
    trainer = trainer_of(
        transformers.GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=40), precision="fp32"
    )
    assert trainer.shares_prompts
    random = np.random.default_rng(0)
    prompt = random.integers(0, 259, 10).tolist()
    samples = [sample_of(prompt, random.integers(0, 259, 12).tolist(), index=n, rollout_id=n) for n in range(6)]
    trainer.train_step(batch_of([group_of(0, [[sample] for sample in samples])], [1.0, -1.0] * 3))


def test_a_model_that_sees_what_comes_later_is_not_trained(trainer_of: MakeTrainer) -> None:
    with pytest.raises(CheckpointError, match=r"not a model to train on what was sampled: it is not causal"):
        trainer_of(transformers.BertConfig(**SMALL, intermediate_size=48))
