"""The routers of a mixture of experts: which experts they choose, and choosing these again.

A router is found by trying: a module of its own that takes the ``k`` largest of a number for each expert. Whatever it
makes of them, before and behind, stays the model's: replayed, it is given the numbers of the experts that were chosen
before, so that gates are those of its own numbers at these experts, with their gradient.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv:2510.11370).

Axes: B rows, L places in a row, E layers with experts, K experts a token and layer, C = E * K, X experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollfeed.model_files.trial import vocab_size_of
from rollfeed.types import RoutedExperts

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TRIED_TOKENS = 5


def num_experts_of(model: Any) -> int | None:
    """Return how many experts a layer has by the model's configuration; None where it has none."""
    config = model.config.get_text_config(decoder=True)
    told = [value for name in _NUM_EXPERTS if isinstance(value := getattr(config, name, None), int) and value > 1]
    return told[0] if told else None


class Routers:
    """The routers of a model, in the order of its layers.

    Raises:
        ValueError: If it has none that is a module of its own; says why.
    """

    def __init__(self, model: Any) -> None:
        num_experts = num_experts_of(model)
        if num_experts is None:
            raise ValueError("it has no experts by its configuration")
        self.num_experts = num_experts
        self.num_hidden_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        found = _find(model, num_experts)
        if not found:
            raise ValueError("no module of it chooses the largest of a number for each of its experts")
        numbers = [int(number[0]) for router in found if (number := re.findall(r"\d+", router.name))]
        if len(set(numbers)) != len(found) or len({router.top_k for router in found}) != 1:
            raise ValueError("its routers are not one a layer, of as many experts each")
        self.top_k = found[0].top_k
        self._layer_numbers = numbers
        self._replayed_BLEK: Tensor | None = None
        self._chosen: list[Tensor] | None = None
        for place, router in enumerate(found):
            _hook(self, router, place)

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return len(self._layer_numbers)

    def problem(self, routed: RoutedExperts | None, num_tokens: int) -> str | None:
        """Return why the experts of a sequence cannot be replayed for its first tokens; None where they can."""
        if routed is None:
            return "has no routed_experts: sample it with sampling.return_routed_experts = true"
        if routed.num_tokens < num_tokens:
            return (
                f"has experts of {routed.num_tokens} tokens, and {num_tokens} are computed: it trains on inserted ones"
            )
        layers = (self.num_layers, self.num_hidden_layers)
        if routed.per_token not in [self.top_k * each for each in layers]:
            return (
                f"has {routed.per_token} experts a token, the model {self.top_k} in {layers[0]} of {layers[1]} layers"
            )
        largest = int(routed.numbers.max(initial=0))
        return None if largest < self.num_experts else f"has expert {largest}, the model has {self.num_experts}"

    def replay(self, experts_BLC: Tensor | None) -> None:
        """Have all passes from now on, those on the way back too, take these experts; None leaves them to the model.

        Numbers are as in :class:`rollfeed.types.RoutedExperts`; -1 stands for padding.
        """
        self._replayed_BLEK = None
        if experts_BLC is None:
            return
        experts_BLEK = experts_BLC.view(*experts_BLC.shape[:2], -1, self.top_k)
        if experts_BLEK.shape[2] != self.num_layers:
            experts_BLEK = experts_BLEK[:, :, self._layer_numbers]
        any_K = torch.arange(self.top_k, device=experts_BLC.device)
        self._replayed_BLEK = torch.where(experts_BLEK < 0, any_K, experts_BLEK)

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """Yield a list to which each router adds what it chooses, ``(B * L, K)`` each, pass after pass."""
        self._chosen = []
        try:
            yield self._chosen
        finally:
            self._chosen = None

    def _choose(self, place: int, scores: Tensor, k: int, result: Any) -> Any:
        """Return the largest of a router's numbers, ``(..., X)``, or those that are replayed."""
        if self._replayed_BLEK is not None:
            chosen = self._replayed_BLEK[:, :, place].reshape(*scores.shape[:-1], k)
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if self._chosen is not None:
            self._chosen.append(result.indices.reshape(-1, k))
        return result


@dataclass(slots=True)
class _Router:
    """A module that chooses experts."""

    module: Any
    name: str
    top_k: int = 0
    num_choices: int = 0
    """How often it takes the largest of a number for each expert, of which the last time chooses."""


class _Choosing(TorchFunctionMode):
    """Looks at each choice of the largest of a number for each expert, given with how many it chooses."""

    def __init__(self, num_experts: int, answer: Callable[[Tensor, int, Any], Any]) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._num_experts or not scores.is_floating_point():
            return result
        return self._answer(scores, result.indices.shape[-1], result)


def _hook(routers: Routers, router: _Router, place: int) -> None:
    """Have a router's choices go through those of its model while it computes."""
    modes: list[_Choosing] = []
    num_left = 0

    def answer(scores: Tensor, k: int, result: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        return result if num_left else routers._choose(place, scores, k, result)

    def begin(module: Any, inputs: Any) -> None:
        nonlocal num_left
        del module, inputs
        num_left = router.num_choices
        modes.append(_Choosing(routers.num_experts, answer))
        modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(module: Any, inputs: Any, outputs: Any) -> None:
        del module, inputs, outputs
        modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    router.module.register_forward_pre_hook(begin)
    router.module.register_forward_hook(end, always_call=True)


def _find(model: Any, num_experts: int) -> list[_Router]:
    """Return what chooses experts, in the order of computing."""
    stack: list[_Router] = []
    found: list[_Router] = []

    def note(scores: Tensor, k: int, result: Any) -> Any:
        del scores
        if stack:
            router = stack[-1]
            router.top_k, router.num_choices = k, router.num_choices + 1
            if router.num_choices == 1:
                found.append(router)
        return result

    def end(module: Any, inputs: Any, outputs: Any) -> None:
        del module, inputs, outputs
        stack.pop()

    hooks = []
    for name, module in model.named_modules():
        router = _Router(module, name)
        hooks.append(module.register_forward_pre_hook(lambda module, inputs, router=router: stack.append(router)))
        hooks.append(module.register_forward_hook(end, always_call=True))
    tokens_BL = torch.arange(_TRIED_TOKENS, device=next(model.parameters()).device)[None] * 7 % vocab_size_of(model)
    try:
        with torch.no_grad(), _Choosing(num_experts, note):
            model(input_ids=tokens_BL, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
