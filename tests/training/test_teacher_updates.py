"""Updates towards a teacher, against the gradient of the divergence itself in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from rollfeed.batch.teacher_advantages import with_teacher
from rollfeed.config.teacher import TeacherSettings
from rollfeed.types import TrainBatch

PROMPT = [40, 50, 60]
LEARNING_RATE, COEFFICIENT = 0.05, 0.7


def log_distribution(model: Any) -> torch.Tensor:
    """Of the token behind the prompt."""
    return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1], -1)


def test_over_all_tokens_an_update_is_that_of_the_divergence_from_the_teacher(
    make_trainer: Any, tiny_checkpoint: Path, sample_of: Any, group_of: Any
) -> None:
    """A token a sample, weighted by its probability: the mean over what the policy samples, without sampling."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float64)
    policy_V = log_distribution(reference)
    teacher_V = torch.log_softmax(torch.from_numpy(np.random.default_rng(5).normal(0, 2, len(policy_V))), -1)
    told_V = policy_V.detach()
    members = [
        [
            sample_of(
                PROMPT,
                [token],
                index=token,
                rollout_id=token,
                mask=[float(told_V[token].exp())],
                logprobs=[float(told_V[token])],
                teacher_logprobs=np.array([float(teacher_V[token])], np.float32),
            )
        ]
        for token in range(len(policy_V))
    ]
    groups = [group_of(0, members)]
    advantages = with_teacher(
        np.zeros(len(members), np.float32),
        groups,
        settings=TeacherSettings(checkpoint="teacher", coefficient=COEFFICIENT),
    )
    batch = TrainBatch(step=0, policy_version=0, groups=tuple(groups), advantages_S=advantages, metrics={})
    optimizer = {"learning_rate": LEARNING_RATE, "epsilon": 1.0, "max_grad_norm": 1e9}
    trainer = make_trainer(optimizer=optimizer, loss={"normalisation": "token"})
    report = trainer.train_step(batch)

    divergence = COEFFICIENT * (policy_V.exp() * (policy_V - teacher_V)).sum()
    divergence.backward()
    np.testing.assert_allclose(report.metrics["train/loss"], divergence.item(), rtol=1e-4)
    updated = trainer.weights()
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad
        wanted = parameter.detach() - LEARNING_RATE * gradient / (gradient.abs() + 1.0)
        torch.testing.assert_close(updated[name], wanted.float(), rtol=0.0, atol=2e-7)
    assert max(float(parameter.grad.abs().max()) for parameter in reference.parameters()) > 1e-2
