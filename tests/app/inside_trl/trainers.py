"""Trainers with what rollfeed asks of TRL's, in an environment without TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

GRPO = {
    "seed": 7,
    "num_generations": 3,
    "num_generations_eval": None,
    "max_completion_length": 8,
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
}
"""The defaults of GRPOConfig, in small."""
ASYNC = {
    "max_staleness": 4,
    "max_inflight_tasks": -1,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 1,
    "world_size": 1,
    "weight_sync_steps": 1,
    "device": SimpleNamespace(type="cpu"),
}


class Rows:
    """A Dataset, as far as it is used."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = list(rows)
        self.column_names = list(rows[0]) if rows else []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def to_parquet(self, path: str) -> None:
        pq.write_table(pa.Table.from_pylist(self._rows), path)


class Trainer:
    """A GRPOTrainer, as far as it is used."""

    def __init__(self, checkpoint: Path, rows: Rows, **arguments: Any) -> None:
        import torch
        from transformers import AutoTokenizer, LlamaForCausalLM

        self.args = SimpleNamespace(**{**GRPO, **arguments})
        self.state = SimpleNamespace(global_step=0)
        self.model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
        self.processing_class = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        self.accelerator = SimpleNamespace(
            unwrap_model=lambda model: model, num_processes=1, process_index=0, device=self.model.device
        )
        self.train_dataset, self.eval_dataset = rows, None
        self.tools: list[Any] = []
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        for callback in self.callbacks:
            callback.on_train_end(self.args, self.state, SimpleNamespace())

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return what its model says of an answer now, at its temperature."""
        return logprobs_of(self.model, prompt_ids, completion_ids, self.args.temperature)


def logprobs_of(
    model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float
) -> NDArray[np.float32]:
    import torch

    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    chosen = torch.log_softmax(logits, -1)[torch.arange(len(completion_ids)), torch.tensor(list(completion_ids))]
    values: NDArray[np.float32] = chosen.numpy()
    return values
