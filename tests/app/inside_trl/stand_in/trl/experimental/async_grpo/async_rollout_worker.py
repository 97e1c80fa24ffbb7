from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RolloutSample:
    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None
