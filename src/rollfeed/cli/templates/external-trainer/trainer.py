"""A trainer of one's own, in plain PyTorch: it follows a run in another process, and gives weights back by a folder.

    python trainer.py runs/outside

Axes: S samples of a batch, L tokens of the longest one, less the first.
"""

import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollfeed import TrainBatch
from rollfeed.app import load_settings_model, stored_spec
from rollfeed.store import RunReader


def policy_loss(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Return PPO's clipped loss, a mean over sampled tokens; ratios are to the probability they were sampled with."""
    length = max(len(sample.token_ids) for sample in batch.samples)
    tokens = torch.zeros(len(batch.samples), length, dtype=torch.int64)  # what follows a sample changes nothing in it
    mask_SL, sampled_SL = torch.zeros(2, len(batch.samples), length - 1)
    for row, sample in enumerate(batch.samples):
        end, first = len(sample.token_ids), len(sample.token_ids) - sample.response_length
        tokens[row, :end] = torch.from_numpy(sample.token_ids)
        mask_SL[row, first - 1 : end - 1] = torch.from_numpy(sample.loss_mask)
        sampled_SL[row, first - 1 : end - 1] = torch.from_numpy(sample.logprobs)
    logits = model(input_ids=tokens[:, :-1]).logits.float()  # at temperature 1, as they were sampled
    logprobs_SL = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    ratio_SL = torch.exp(logprobs_SL - sampled_SL)
    advantages_S1 = torch.from_numpy(batch.advantages_S)[:, None]
    gain_SL = torch.minimum(ratio_SL * advantages_S1, ratio_SL.clamp(0.8, 1.2) * advantages_S1)
    return -(gain_SL * mask_SL).sum() / mask_SL.sum()


def publish(model: PreTrainedModel, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write a version whole before it has its name, and keep the last three."""
    writing = folder.with_name(f".{folder.name}")
    model.save_pretrained(writing)
    torch.save(optimizer.state_dict(), writing / "optimizer.pt")
    writing.rename(folder)
    for old in sorted(folder.parent.glob("version-*"))[:-3]:
        shutil.rmtree(old)


def train(out: Path) -> None:
    """Make an update of each batch of a run until it ends; where there are versions, go on from the newest."""
    with RunReader(out, wait_seconds=600) as run:
        settings = stored_spec(out).settings
        directory = Path(str(settings.weights.directory))
        newest = max(directory.glob("version-*"), default=None)
        model = AutoModelForCausalLM.from_pretrained(newest or load_settings_model(settings).checkpoint)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
        if newest is not None:
            optimizer.load_state_dict(torch.load(newest / "optimizer.pt"))
        for record in run.follow(start=0 if newest is None else int(newest.name[-6:])):
            loss = policy_loss(model, run.batch(record.step))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            publish(model, optimizer, directory / f"version-{record.step + 1:06}")
            reward = record.metrics["rollout/reward_mean"]
            print(f"step {record.step}: reward {reward:.3f}, loss {loss.item():+.4f}", flush=True)


if __name__ == "__main__":
    disable_progress_bar()
    torch.set_num_threads(1)  # the model is too small to be worth two
    train(Path(sys.argv[1]))
