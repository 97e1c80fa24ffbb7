"""The tensors of a transformers model by the names of its checkpoint.

transformers renames tensors when it loads a checkpoint, and fuses some, those of experts for example. Checkpoints and
servers know names and shapes of the checkpoint only, so these are what is published, written and taken. Both ways are
transformers' own conversions, those that it loaded this checkpoint with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


class _ModelPlace(NamedTuple):
    """The place of a checkpoint's tensor in the model."""

    own: str
    """The model's name for it, or for the first of those that it is a part of or has become."""
    pattern: str | None = None
    """What its conversion is known by; None for a tensor that is the same in both."""


class CheckpointNames:
    """Translates between a model's tensors and the names of its checkpoint.

    Args:
        model: As transformers loaded it; one on the meta device shows names and shapes.
        stored: The names of the checkpoint's tensors; those that the model does not have are passed over.
    """

    def __init__(self, model: Any, stored: Iterable[str]) -> None:
        self._model = model
        self._conversions = getattr(model, "_weight_conversions", None) or []
        self._renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self._conversions if isinstance(each, WeightConverter)]
        self._converter_of = {pattern: each for each in self._converters for pattern in each.source_patterns}
        state = self._state()
        places = {name: self._place(name, state) for name in stored}
        self._stored = {name: place for name, place in places.items() if place.own in state}
        self._parts: dict[str, list[str]] = defaultdict(list)
        """The checkpoint's names of what is converted together, by their place in the model."""
        for name, place in self._stored.items():
            if place.pattern is not None:
                self._parts[place.own].append(name)
        same = {id(state[place.own]) for place in self._stored.values() if place.pattern is None}
        self._own = {own: _ModelPlace(own) for own, tensor in state.items() if id(tensor) in same}
        rest: dict[int, str] = {}  # tied ones once
        for own, tensor in state.items():
            if id(tensor) not in same:
                rest.setdefault(id(tensor), own)
        self._rest = tuple(rest.values())
        self._converted = self._converted_shapes(state)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that :meth:`convert` takes, by name.

        Those are the checkpoint's; where it has them as the model does, the model's names do as well.
        """
        state = self._state()
        same = {**self._own, **self._stored}
        return {
            **{name: tuple(state[place.own].shape) for name, place in same.items() if place.pattern is None},
            **self._converted,
        }

    @property
    def ties(self) -> dict[str, Hashable]:
        """A value for each name of :attr:`shapes`, the same one where names stand for one tensor."""
        state = self._state()
        same = {**self._own, **self._stored}
        return {
            **{name: id(state[place.own]) for name, place in same.items() if place.pattern is None},
            **{name: name for name in self._converted},
        }

    @property
    def whole_numbers(self) -> set[str]:
        """Names of tensors that are no floating point numbers, such as a table of experts by token."""
        state = self._state()
        same = {**self._own, **self._stored}
        return {name for name, place in same.items() if not state[place.own].is_floating_point()}

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the checkpoint as the model has them now, by the checkpoint's names.

        They are parameters, and buffers that a checkpoint keeps. Those that need no conversion are the model's own
        memory.
        """
        found = self.unchanged
        return {**found, **self.reverted(self._unlike())} if self._converted else found

    @property
    def unchanged(self) -> dict[str, Tensor]:
        """Those of :meth:`tensors` that need no conversion, in the model's own memory."""
        state = self._state()
        return {name: state[place.own].detach() for name, place in self._stored.items() if place.pattern is None}

    @property
    def changed(self) -> list[dict[str, Tensor]]:
        """The others as the model has them, by its names: what :meth:`reverted` takes at a time."""
        if not self._converted:
            return []
        unlike = self._unlike()
        alone = [self._revert({own: torch.empty(each.shape, device="meta")}) for own, each in unlike.items()]
        found = {name: tuple(tensor.shape) for each in alone for name, tensor in each.items()}
        if all(found.get(name) == shape for name, shape in self._converted.items()):
            return [{own: tensor} for own, tensor in unlike.items()]
        return [unlike]

    def reverted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint's tensors that some of the model's were made of."""
        return {name: tensor for name, tensor in self._revert(tensors).items() if name in self._converted}

    def tensor(self, name: str) -> Tensor | None:
        """Return one tensor by a name of :attr:`shapes`; None for another name."""
        place = self._stored.get(name) or self._own.get(name)
        if place is not None and place.pattern is None:
            return self._state()[place.own].detach()
        return self.tensors().get(name)

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by the model's names; a part of a larger one comes with the other parts as they are now."""
        found: dict[str, Tensor] = {}
        given: dict[str, dict[str, Tensor]] = defaultdict(dict)
        state = self._state()
        for name, tensor in tensors.items():
            place = self._stored.get(name, _ModelPlace(name))
            if place.pattern is None:
                found[place.own] = tensor
            else:
                given[place.own][name] = tensor.to(state[place.own])
        if any(len(parts) < len(self._parts[own]) for own, parts in given.items()):
            present = self.tensors()
            for own, parts in given.items():
                given[own] = {name: parts.get(name, present[name]) for name in self._parts[own]}
        for own, parts in given.items():
            found |= self._fused(own, parts)
        return found

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        return state

    def _unlike(self) -> dict[str, Tensor]:
        """Return the model's tensors without a like in the checkpoint, tied ones once."""
        state = self._state()
        return {own: state[own].detach() for own in self._rest}

    def _place(self, name: str, state: Mapping[str, Tensor]) -> _ModelPlace:
        """Return where transformers puts a tensor; a name that the model does not have is no place."""
        prefix: dict[str, Any] = {"base_model_prefix": self._model.base_model_prefix, "meta_state_dict": state}
        place = _ModelPlace(*rename_source_key(name, self._renamings, self._converters, **prefix))
        if place.own not in state and name in state:
            place = _ModelPlace(*rename_source_key(name, [], [], **prefix))
        return place

    def _converted_shapes(self, state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes that the tensors without a like in the checkpoint have there.

        Buffers that it does not keep are left out.
        """
        if not self._rest:
            return {}
        trained = {name for name, _ in self._model.named_parameters()}
        empty = {own: torch.empty_like(state[own], device="meta") for own in self._rest}
        return {
            name: tuple(tensor.shape)
            for name, tensor in self._revert(empty).items()
            if name in self._stored or name in trained
        }

    def _revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._conversions:
            return dict(tensors)
        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(tensors))
        return {self._spelled(name): tensor for name, tensor in reverted.items()}

    def _spelled(self, name: str) -> str:
        """Return the name with or without the prefix of the model's body, as the checkpoint has it."""
        prefix = f"{self._model.base_model_prefix}."
        return next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in self._stored), name)

    def _fused(self, own: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what transformers makes of the parts of one conversion, by the model's names."""
        names = sorted(parts, key=dot_natural_key)
        patterns = {name: self._stored[name].pattern or "" for name in names}
        conversion: Any = deepcopy(self._converter_of[patterns[names[0]]])
        for name in names:
            conversion.add_tensor(own, name, patterns[name], parts[name])
        values: dict[str, Any] = conversion.convert(own, model=self._model, config=self._model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in values.items()}
