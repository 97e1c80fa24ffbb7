"""The policy that divergence is measured from, as a trainer holds it.

Axes: T trained tokens of a micro-batch.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from rollfeed.model_files.low_rank import PastAdapter
from rollfeed.training.model import Policy, hold_linear_layers_as_computed
from rollfeed.training.packing import MicroBatch


class HeldReference:
    """A model of its own, or the trained one with its adapter as it was.

    Args:
        trained: The policy that is trained.
        own: The reference's model as a policy; None where ``trained`` has an adapter, and the reference its weights.
        is_given: Whether ``own`` is another model than training begins with.
        is_spread: Whether the models are spread over ranks.
    """

    def __init__(self, trained: Policy, own: Policy | None, *, is_given: bool, is_spread: bool) -> None:
        self._trained = trained
        self._own = own
        self._is_given = is_given
        self._past = PastAdapter(trained.model) if own is None else None
        if own is not None:
            own.model.requires_grad_(False)
            if not is_spread:
                hold_linear_layers_as_computed(own)

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Return what the reference says of the trained tokens, ``(T,)``, without gradient."""
        with torch.no_grad(), self._past.in_place() if self._past else nullcontext():
            return (self._own or self._trained).score(micro_batch).logprobs_T

    def take(self) -> None:
        """Become the trained policy as it is now, unless another model was given."""
        if self._past is not None:
            self._past.take()
        elif self._own is not None and not self._is_given:
            self._own.model.load_state_dict(self._trained.model.state_dict())
