"""The policy that divergence is measured from, as a trainer holds it.

Axes: T trained tokens of a micro-batch.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import torch
from torch import Tensor

from rollfeed.config.train import LossSettings
from rollfeed.model_files.low_rank import PastAdapter
from rollfeed.training.checkpoint import buffers_of
from rollfeed.training.model import Policy, hold_linear_layers_as_computed
from rollfeed.training.packing import MicroBatch

logger = logging.getLogger(__name__)


class HeldReference:
    """A model of its own, or the trained one with its adapter as it was; refreshed by the policy now and then.

    Args:
        trained: The policy that is trained.
        own: The reference's model as a policy; None where ``trained`` has an adapter, and the reference its weights.
        settings: When it is refreshed, and by how much.
        is_given: Whether ``own`` is another model than training begins with.
        is_spread: Whether the models are spread over ranks.
    """

    def __init__(
        self, trained: Policy, own: Policy | None, *, settings: LossSettings, is_given: bool, is_spread: bool
    ) -> None:
        self._trained = trained
        self._own = own
        self._interval, self._alpha = settings.reference_refresh_interval, settings.reference_mixup_alpha
        self._is_given = is_given
        self._past = PastAdapter(trained.model) if own is None else None
        self.is_stored = self._interval > 0
        """Whether :meth:`tensors` belong to the trainer's state: they are not those that a training begins with."""
        if own is not None:
            own.model.requires_grad_(False)
            # A small part of something is lost where the rest is rounded.
            if not is_spread and self._alpha == 1.0:
                hold_linear_layers_as_computed(own)

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Return what the reference says of the trained tokens, ``(T,)``, without gradient."""
        with torch.no_grad(), self._past.in_place() if self._past else nullcontext():
            return (self._own or self._trained).score(micro_batch).logprobs_T

    def take(self) -> None:
        """Become the trained policy as it is now, unless another model was given."""
        if not self._is_given:
            self._mix(1.0)

    def refresh(self, step: int) -> None:
        """Follow the trained policy, where it is time after ``step`` batches.

        Sources: TR-DPO (arXiv:2404.09656, section 3: the hard and the soft update), as TRL has it; slime replaces the
        reference.
        """
        if self._interval and step % self._interval == 0:
            self._mix(self._alpha)
            logger.info("after %d batches the reference is refreshed by the policy", step)

    def tensors(self) -> dict[str, Tensor]:
        """Return what the reference is made of, by the model's names; its own memory."""
        return dict(self._past.tensors) if self._past else _tensors(self._own)

    def _mix(self, share: float) -> None:
        if self._past is not None:
            self._past.take()
            return
        given = _tensors(self._trained)
        for name, tensor in self.tensors().items():
            if share == 1.0 or not tensor.is_floating_point():
                tensor.copy_(given[name])
            else:
                tensor.lerp_(given[name], share)


def _tensors(policy: Policy | None) -> dict[str, Tensor]:
    assert policy is not None
    parameters = policy.model.named_parameters()
    return {**{name: each.detach() for name, each in parameters}, **buffers_of(policy.model)}
