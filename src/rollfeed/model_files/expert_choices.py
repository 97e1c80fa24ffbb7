"""The routers of a mixture of experts: which experts they choose, choosing these again, and how evenly they choose.

A router is found by trying: a module of its own that takes the ``k`` largest of a number for each expert. Whatever it
makes of them, before and behind, stays the model's: replayed, it is given the numbers of the experts that were chosen
before, so that gates are those of its own numbers at these experts, with their gradient.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv:2510.11370).

Axes: B rows, L places in a row, N = B * L, E layers with experts, K experts a token and layer, C = E * K, X experts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def has_balancing_loss(model: Any) -> bool:
    """Whether transformers computes a load-balancing loss of such a model."""
    return "output_router_logits" in inspect.signature(model.forward).parameters


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


class RouterBalance(NamedTuple):
    """The evenness with which the routers of a pass choose experts, by what they would choose themselves."""

    loss: Tensor
    """The load-balancing loss, ``()``, with gradient: as many as experts a token where all are even, more otherwise."""
    load_EX: Tensor
    """Choices of an expert over those of one of as many equal ones."""


class BalanceMeter:
    """Says after each pass of a model how evenly its routers have spread the tokens.

    The loss is Switch's (arXiv:2101.03961, section 2.2) for several experts a token, over all layers together, computed
    by transformers' own function from the numbers that its models give away as ``router_logits``.

    Raises:
        ValueError: If it gives none away; says why.
    """

    def __init__(self, model: Any) -> None:
        num_experts = num_experts_of(model)
        if num_experts is None:
            raise ValueError("it has no experts by its configuration")
        if not has_balancing_loss(model):
            raise ValueError("transformers computes no load-balancing loss of it")
        self._num_experts = num_experts
        self._top_k = int(getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", 0))
        self._logits: tuple[Tensor, ...] = ()
        # Asked for behind the head, its own loss would take the mask of a row with branches for one of padding.
        body = model.base_model
        body.register_forward_pre_hook(_ask_for_logits, with_kwargs=True)
        body.register_forward_hook(self._take)
        with torch.no_grad():
            _try(model)
        if not self._top_k or not self._logits or any(each.shape[-1] != num_experts for each in self._logits):
            raise ValueError("its routers do not give away a number for each of its experts")

    def read(self, is_token_BL: Tensor) -> RouterBalance:
        """Return the balance of the last pass over the places that are not padding."""
        from transformers.models.mixtral import modeling_mixtral

        loss_of: Callable[..., Any] = modeling_mixtral.load_balancing_loss_func
        logits = tuple(each.float() for each in self._logits)
        self._logits = ()
        loss: Tensor = loss_of(logits, self._num_experts, self._top_k, is_token_BL)
        is_token_N = is_token_BL.reshape(-1).float()
        with torch.no_grad():
            chosen_EN = torch.stack([each.topk(self._top_k, dim=-1).indices for each in logits]).flatten(1)
            counted_EN = is_token_N.repeat_interleave(self._top_k).expand(chosen_EN.shape)
            count_EX = torch.zeros(len(logits), self._num_experts, device=chosen_EN.device)
            count_EX.scatter_add_(1, chosen_EN, counted_EN)
            load_EX = count_EX * (self._num_experts / self._top_k) / is_token_N.sum()
        return RouterBalance(loss, load_EX)

    def _take(self, module: Any, inputs: Any, outputs: Any) -> None:
        del module, inputs
        self._logits = tuple(getattr(outputs, "router_logits", None) or ())


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
    try:
        with torch.no_grad(), _Choosing(num_experts, note):
            _try(model)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _try(model: Any) -> None:
    tokens_BL = torch.arange(_TRIED_TOKENS, device=next(model.parameters()).device)[None] * 7 % vocab_size_of(model)
    model(input_ids=tokens_BL, use_cache=False)


def _ask_for_logits(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    del module
    return args, {**kwargs, "output_router_logits": True}
