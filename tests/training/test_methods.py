"""Every ``train.method`` against its paper: whole trainings, written again here in float64, one sequence at a time.

Rewards become advantages, those losses, those gradients and weights, over several batches, epochs and mini-batches, so
that ratios leave 1 and are clipped; there are forks, masks, groups of equal rewards, and log-probabilities of an engine
that differ from the trainer's. Nothing of the package computes the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from rollfeed.batch import batch_advantages
from rollfeed.config import Settings, validate_settings
from rollfeed.config.method import Method
from rollfeed.training.trainer import Trainer
from rollfeed.types import Group, Sample, TrainBatch, VersionSpan

LEARNING_RATE, EPSILON, WEIGHT_DECAY, MAX_NORM = 0.4, 0.1, 0.05, 0.9
EPOCHS, MINIBATCHES, LONGEST = 2, 2, 16
Advantages = Callable[[list[Group]], list[list[float]]]
"""One a rollout, a list a group."""


def settings_of(method: str, loss: dict[str, str], *, share_prompts: bool) -> Settings:
    tables = {
        "prompts": {"environments": [{"id": "core/copy_text"}]},
        "train": {
            "method": method,
            "loss": loss,
            "num_epochs": EPOCHS,
            "num_minibatches": MINIBATCHES,
            "micro_batch_tokens": 40,
            "share_prompts": share_prompts,
            "threads": 1,
            "device": "cpu",
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "epsilon": EPSILON,
                "weight_decay": WEIGHT_DECAY,
                "max_grad_norm": MAX_NORM,
            },
        },
    }
    return validate_settings(tables, where="test")


# The methods, as their papers have them.


def by_std(groups: list[Group]) -> list[list[float]]:
    """GRPO, section 4.1.2; the deviation with n - 1."""
    advantages = []
    for group in groups:
        rewards = [rollout.samples[0].reward for rollout in group.rollouts]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        advantages.append([(reward - mean) / (deviation + 1e-6) for reward in rewards])
    return advantages


def by_mean(groups: list[Group]) -> list[list[float]]:
    rewards = [[rollout.samples[0].reward for rollout in group.rollouts] for group in groups]
    return [[reward - sum(each) / len(each) for reward in each] for each in rewards]


def leave_one_out(groups: list[Group]) -> list[list[float]]:
    rewards = [[rollout.samples[0].reward for rollout in group.rollouts] for group in groups]
    return [[reward - (sum(each) - reward) / (len(each) - 1) for reward in each] for each in rewards]


def whitened(groups: list[Group]) -> list[list[float]]:
    """Token by token."""
    samples = trained([sample for group in groups for sample in group.samples])
    tokens = [sample.reward for sample in samples for weight in sample.loss_mask if weight != 0]
    mean, deviation = np.mean(tokens), np.std(tokens, ddof=1)
    return [[(rollout.samples[0].reward - mean) / (deviation + 1e-6) for rollout in group.rollouts] for group in groups]


class Policy:
    """Log-probabilities of the trained tokens of each sample of a rollout: now, at first, and as they were sampled."""

    def __init__(self, now: list[Tensor], start: list[Tensor], sampled: list[Tensor], old: str) -> None:
        self.now = now
        self.sampled = sampled
        self.start = start
        self.old = sampled if old == "rollout" else start

    def clipped(self, sample: int, advantage: float, low: float, high: float, dual: float | None = None) -> Tensor:
        """PPO, equation 7, one a token; with dual clip, equation 4 of arXiv:1912.09729."""
        losses = []
        for new, old in zip(self.now[sample], self.old[sample], strict=True):
            ratio = torch.exp(new - old)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            if dual is not None and advantage < 0:
                surrogate = torch.maximum(surrogate, torch.tensor(dual * advantage, dtype=torch.float64))
            losses.append(-surrogate)
        return torch.stack(losses)

    def of_sequence(self, sample: int, advantage: float, low: float, high: float, dual: float) -> Tensor:
        """GSPO, equation 14: the ratio of the sequence, the gradient of each token."""
        new, old = self.now[sample], self.old[sample]
        ratio = torch.exp((new - old).mean().detach()) * torch.exp(new) / torch.exp(new).detach()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return -(surrogate.clamp(min=dual * advantage) if advantage < 0 else surrogate)

    def weighted(self, sample: int, advantage: float, high: float) -> Tensor:
        """CISPO, equations 4 and 5."""
        ratio = torch.exp(self.now[sample] - self.old[sample]).detach()
        return -torch.clamp(ratio, max=1 + high) * advantage * self.now[sample]


Losses = Callable[[Policy, int, float], Tensor]
REFERENCES: dict[str, tuple[Advantages, Losses, str]] = {
    "grpo": (by_std, lambda p, s, a: p.clipped(s, a, 0.2, 0.2), "rollout"),
    "dr_grpo": (by_mean, lambda p, s, a: p.clipped(s, a, 0.2, 0.2), "constant"),
    "dapo": (by_std, lambda p, s, a: p.clipped(s, a, 0.2, 0.28, 3.0), "token"),
    "gspo": (by_std, lambda p, s, a: p.of_sequence(s, a, 3e-4, 4e-4, 3.0), "rollout"),
    "reinforce_pp": (whitened, lambda p, s, a: p.clipped(s, a, 0.2, 0.2), "token"),
    "rloo": (leave_one_out, lambda p, s, a: p.clipped(s, a, 0.2, 0.2), "sum"),
    "cispo": (by_std, lambda p, s, a: p.weighted(s, a, 4.0), "token"),
}


def corrected(losses: Tensor, policy: Policy, sample: int, correction: str, level: str) -> Tensor:
    ratios = torch.exp(policy.start[sample] - policy.sampled[sample])
    if level == "sequence":
        ratios = torch.exp((policy.start[sample] - policy.sampled[sample]).sum()).expand(len(losses))
    if correction == "truncate":
        return losses * torch.minimum(ratios, torch.tensor(2.0))
    if correction == "mask":
        return losses * torch.where((ratios >= 0.5) & (ratios <= 2.0), ratios, torch.zeros(()).double())
    return losses


def trained(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.loss_mask.any() and not sample.remove_sample]


class Reference:
    """A trainer of the formulas."""

    def __init__(self, checkpoint: Path, method: str, **loss: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        self.advantages, self.losses, self.normalisation = REFERENCES[method]
        self.old = loss.get("old_logprobs", "trainer")
        self.correction, self.level = loss.get("correction", "none"), loss.get("correction_level", "token")
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.model.named_parameters()}
        self.num_updates = 0

    def logprobs(self, sample: Sample) -> Tensor:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(self.model(tokens[None]).logits[0, sample.prompt_length - 1 : -1], -1)
        chosen = logprobs.gather(1, tokens[sample.prompt_length :, None])[:, 0]
        return chosen[torch.from_numpy(sample.loss_mask != 0)]

    def train(self, groups: list[Group]) -> float:
        """Train on a batch; return the mean loss of its updates."""
        advantages = self.advantages(groups)
        with torch.no_grad():
            start = {sample.index: self.logprobs(sample) for group in groups for sample in trained(group.samples)}
        losses = []
        for _ in range(EPOCHS):
            for part in np.array_split(np.arange(len(groups)), MINIBATCHES):
                loss = self.loss([(groups[i], advantages[i]) for i in part], start)
                losses.append(float(loss.detach()))
                self.update(loss)
        return float(np.mean(losses))

    def loss(self, part: list[tuple[Group, list[float]]], start: dict[int, Tensor]) -> Tensor:
        sums, sizes = [], []
        for group, advantages in part:
            for rollout, advantage in zip(group.rollouts, advantages, strict=True):
                if not (samples := trained(rollout.samples)):
                    continue
                policy = Policy(
                    [self.logprobs(sample) for sample in samples],
                    [start[sample.index] for sample in samples],
                    [torch.from_numpy(s.logprobs[s.loss_mask != 0].astype(np.float64)) for s in samples],
                    self.old,
                )
                each = [
                    corrected(self.losses(policy, n, advantage), policy, n, self.correction, self.level)
                    for n in range(len(samples))
                ]
                sums.append(torch.cat(each).sum())
                sizes.append(sum(map(len, each)))
        if self.normalisation == "token":
            return torch.stack(sums).sum() / sum(sizes)
        divided = {
            "rollout": [total / size for total, size in zip(sums, sizes, strict=True)],
            "constant": [total / LONGEST for total in sums],
            "sum": sums,
        }[self.normalisation]
        return torch.stack(divided).mean()

    def update(self, loss: Tensor) -> None:
        """AdamW, from its formulas."""
        self.model.zero_grad()
        loss.backward()
        parameters = dict(self.model.named_parameters())
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters.values()))
        self.num_updates += 1
        for name, parameter in parameters.items():
            gradient = parameter.grad * min(1.0, MAX_NORM / (norm + 1e-6))
            first, second = self.moments[name]
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.999).add_(0.001 * gradient**2)
            mean, square = first / (1 - 0.9**self.num_updates), second / (1 - 0.999**self.num_updates)
            decay = LEARNING_RATE * WEIGHT_DECAY if parameter.ndim >= 2 else 0.0
            with torch.no_grad():
                parameter.mul_(1 - decay).sub_(LEARNING_RATE * mean / (square.sqrt() + EPSILON))


def make_groups(seed: int, trainer: Trainer, batch_by_seed: Callable[..., TrainBatch]) -> list[Group]:
    """Four groups: with a fork, an empty response and one that is not trained on; the third has equal rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, group in enumerate(batch_by_seed(seed, num_groups=4, size=3).groups):
        rollouts = []
        for member, rollout in enumerate(group.rollouts):
            reward = 1.0 if number == 2 else float(rng.normal())
            (sample,) = (replace(each, reward=reward) for each in rollout.samples)
            samples = [sample]
            if (number, member) == (1, 0):
                token_ids = np.append(sample.token_ids, np.arange(3, dtype=np.int32))
                length = sample.response_length + 3
                samples.append(
                    replace(
                        sample,
                        index=1000,
                        token_ids=token_ids,
                        response_length=length,
                        loss_mask=np.append(np.zeros(length - 3, np.float32), np.ones(3, np.float32)),
                        logprobs=np.zeros(length, np.float32),
                        version_spans=(VersionSpan(0, 1, 0), VersionSpan(1, length, 1)),
                    )
                )
            if (number, member) == (3, 2):
                samples = [replace(sample, remove_sample=True)]
            noisy = [
                replace(each, logprobs=np.minimum(own + rng.normal(0, 0.4, len(own)), 0.0).astype(np.float32))
                for each, own in zip(samples, trainer.logprobs(samples), strict=True)
            ]
            rollouts.append(replace(rollout, samples=tuple(noisy)))
        groups.append(replace(group, rollouts=tuple(rollouts)))
    return groups


PLAIN: dict[str, str] = {}
ROLLOUT = {"old_logprobs": "rollout"}
CORRECTIONS = [{"correction": "truncate", "correction_level": "sequence"}, {"correction": "mask"}]
CASES = [
    *((method, PLAIN, True) for method in Method),
    *((method, ROLLOUT, False) for method in Method),
    *((method, loss, False) for method in ("grpo", "gspo", "cispo") for loss in CORRECTIONS),
]


@pytest.mark.parametrize(("method", "loss", "share_prompts"), CASES)
def test_a_whole_training_is_that_of_the_paper(
    method: str,
    loss: dict[str, str],
    share_prompts: bool,
    tiny_checkpoint: Path,
    batch_by_seed: Callable[..., TrainBatch],
) -> None:
    settings = settings_of(method, loss, share_prompts=share_prompts)
    trainer = Trainer(
        tiny_checkpoint, settings=settings.train, temperature=1.0, num_batches=9, max_response_length=LONGEST
    )
    # Masks of shared prompts are float32, and so are the models that take them.
    tolerance = 5e-4 if share_prompts else 2e-5
    if not share_prompts:
        trainer.policy.model.double()
    reference = Reference(tiny_checkpoint, method, **loss)
    for step in range(2):
        groups = make_groups(step, trainer, batch_by_seed)
        batch = TrainBatch(
            step=step,
            policy_version=step,
            groups=tuple(groups),
            advantages_S=batch_advantages(groups, settings=settings.advantage),
            metrics={},
        )
        metrics = trainer.train_step(batch).metrics
        assert metrics["train/loss"] == pytest.approx(reference.train(groups), abs=tolerance)
        assert metrics["train/updates"] == EPOCHS * MINIBATCHES
        assert metrics["train/micro_batches"] > MINIBATCHES
    parameters = dict(reference.model.named_parameters())
    for name, tensor in trainer.weights().items():
        difference = (tensor.double() - parameters[name].detach()).abs().max()
        assert difference < tolerance, f"{name} is off by {difference:.1e}"
    assert metrics["train/clipped_low_ratio"] + metrics["train/clipped_high_ratio"] > 0.1
    assert metrics["train/policy_ratio_min"] < 0.7 < 5.0 < metrics["train/policy_ratio_max"]
