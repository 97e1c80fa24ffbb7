"""AdamW over named parameters, with a state that can be saved by name, and its learning rate."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollfeed.config.optimizer import LearningRateSchedule, OptimizerSettings
from rollfeed.errors import CheckpointError
from rollfeed.training.ranks import fill, total_norm

_log = logging.getLogger(__name__)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_PART_ELEMENTS = 1 << 28
"""Parameters whose moments are on the GPU at a time, where they are kept by the CPU."""


class Optimizer:
    """Updates a model's parameters from their gradients.

    Source: AdamW, arXiv:1711.05101, algorithm 2, with the schedule in the learning rate.

    ``num_updates`` is the length of the schedule.
    """

    def __init__(self, model: Any, *, settings: OptimizerSettings, num_updates: int) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        """By name, tied ones once."""
        self.num_updates = 0
        """Updates so far, those left out included; what the schedule goes by."""
        self._settings = settings
        self._planned = num_updates
        decayed = [parameter for parameter in self.parameters.values() if parameter.ndim >= 2]
        other = [parameter for parameter in self.parameters.values() if parameter.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": other, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )
        self._ordered = [*decayed, *other]

    @property
    def learning_rate(self) -> float:
        """The rate that the next update takes."""
        return learning_rate(
            self.num_updates,
            peak=self._settings.learning_rate,
            schedule=self._settings.schedule,
            num_updates=self._planned,
            warmup_updates=self._settings.warmup_updates,
            final_ratio=self._settings.final_learning_rate_ratio,
        )

    def step(self) -> float:
        """Clip the gradients and update the parameters; return the norm before clipping.

        When the norm is not finite nothing is changed. The gradients are gone afterwards in any case.
        """
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = total_norm(gradients)
        if math.isfinite(norm):
            scale = self._settings.max_grad_norm / (norm + 1e-6)
            if scale < 1.0:
                torch._foreach_mul_(gradients, scale)
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            if self._settings.offload:
                self._step_in_parts()
            else:
                self._adamw.step()
        return norm

    def _step_in_parts(self) -> None:
        """Update some parameters at a time, with their moments beside them for that time only."""
        gradients = {each: each.grad for each in self._ordered if each.grad is not None}
        self.forget_gradients()
        parts: list[list[torch.nn.Parameter]] = [[]]
        for parameter in gradients:
            if sum(each.numel() for each in (*parts[-1], parameter)) > _PART_ELEMENTS:
                parts.append([])
            parts[-1].append(parameter)
        for part in parts:
            kept = {each: dict(self._adamw.state[each]) for each in part}
            for parameter in part:
                parameter.grad = gradients.pop(parameter)
                for name in _MOMENTS if kept[parameter] else ():
                    self._adamw.state[parameter][name] = kept[parameter][name].to(parameter.device, non_blocking=True)
            self._adamw.step()  # parameters without a gradient are left alone
            for parameter in part:
                parameter.grad = None
                for name in _MOMENTS:
                    moment = self._adamw.state[parameter][name]
                    own = kept[parameter].get(name)
                    if own is None or own.device.type != "cpu":
                        own = torch.empty_like(moment, device="cpu", pin_memory=moment.is_cuda)
                    self._adamw.state[parameter][name] = own.copy_(moment, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the CPU has is whole when somebody reads it

    def forget_gradients(self) -> None:
        """Let the memory of the gradients go."""
        self._adamw.zero_grad(set_to_none=True)

    def first_broken_gradient(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not math.isfinite(total_norm([parameter.grad])):
                return name
        return None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the moments by ``exp_avg/NAME`` and so on, its own memory, and JSON values."""
        tensors: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for name, parameter in self.parameters.items():
            state = self._adamw.state.get(parameter)
            if state:
                tensors |= {f"{moment}/{name}": state[moment].detach() for moment in _MOMENTS}
                steps[name] = int(state["step"])
        values = {"num_updates": self.num_updates, "schedule_updates": self._planned}
        return tensors, {**values, "optimizer_steps": steps}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned.

        Unless ``decay_batches`` says otherwise the schedule has the length that it had.

        Raises:
            CheckpointError: If a moment is missing or of another shape, or the learning rate would be 0 for updates
                that have been added; nothing is changed then.
        """
        planned = self._planned_before(values)
        steps: Mapping[str, int] = values["optimizer_steps"]
        names = {parameter: name for name, parameter in self.parameters.items()}
        states: dict[int, dict[str, Tensor]] = {}
        for index, parameter in enumerate(self._ordered):
            name = names[parameter]
            if name not in steps:
                continue
            states[index] = {"step": torch.tensor(float(steps[name]))}
            for moment in _MOMENTS:
                tensor = tensors.get(f"{moment}/{name}")
                if tensor is None or tensor.shape != parameter.shape:
                    raise CheckpointError(f"the trainer's state has no {moment} for {name!r} of the model's shape")
                states[index][moment] = torch.zeros_like(parameter)
                fill(states[index][moment], tensor)
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": states})
        self.num_updates, self._planned = int(values["num_updates"]), planned

    def _planned_before(self, values: Mapping[str, Any]) -> int:
        """Return the length of the schedule that goes on from a state."""
        settings, asked = self._settings, self._planned
        planned = int(values.get("schedule_updates", asked))  # states of earlier versions do not say
        if settings.decay_batches is not None or settings.schedule is LearningRateSchedule.CONSTANT:
            return asked
        if planned < asked:
            left = settings.final_learning_rate_ratio
            remedy = "set train.optimizer.decay_batches to the batches at the end of which it shall have fallen"
            told = f"the learning rate falls until update {planned}, as the training began, and {asked} are asked for"
            if left == 0:
                raise CheckpointError(f"{told}, of which the last ones would change nothing: {remedy}")
            _log.warning(
                "%s: it stays at %g from there; %s to change that", told, settings.learning_rate * left, remedy
            )
        return planned


class Stopwatch:
    """Adds up how long the parts of a step take."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began


def learning_rate(
    update: int,
    *,
    peak: float,
    schedule: LearningRateSchedule,
    num_updates: int,
    warmup_updates: int,
    final_ratio: float,
) -> float:
    """Return the learning rate of an update, a function of its number alone.

    Args:
        update: From 0; what is over ``num_updates`` has the last one's.
        peak: The rate after the warm-up.
        schedule: How it goes on from there.
        num_updates: Updates of the whole run.
        warmup_updates: How many rise in a line, the first by one part of it.
        final_ratio: What is left of the peak in the last update, unless it is constant.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule is LearningRateSchedule.CONSTANT:
        return peak
    falling = max(1, num_updates - warmup_updates - 1)
    progress = min(1.0, (update - warmup_updates) / falling)
    left = 1.0 - progress if schedule is LearningRateSchedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (final_ratio + (1.0 - final_ratio) * left)
