"""Low-rank adapters of peft on a model of transformers: trained alone, merged when published, saved in peft's layout.

The model keeps its class and its weights; adapted layers get two small matrices beside theirs. A weight is merged when
somebody asks for it, so that there is never a second model in memory. Weights and adapters may be spread over
processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files.expert_choices import num_experts_of
from rollfeed.model_files.names import CheckpointNames

_log = logging.getLogger(__name__)

_ADAPTER = "default"
"""As peft calls the one adapter of a model; files leave it out."""
_SEED = 0
"""Of one half of the adapter, the other half being 0: a training that begins again begins with the same one."""
_ALL_LINEAR = "all-linear"
_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Layers that peft takes for those of a mixture's experts, all of which transformers holds as one tensor."""
_WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Of a model's names in peft's files."""


def check_targets(model: Any, target_modules: Sequence[str]) -> None:
    """Refuse names of modules that a model does not have, or that cannot be adapted; it may be on the meta device.

    Raises:
        ConfigError: With the first one, and the names that there are.
    """
    if list(target_modules) == [_ALL_LINEAR]:
        return
    modules, linear, is_mixture = dict(model.named_modules()), _linear_names(model), num_experts_of(model) is not None
    for target in target_modules:
        found = {name for name in modules if name == target or name.endswith(f".{target}")}
        if is_mixture and target.rpartition(".")[2] in _OF_EXPERTS:
            raise ConfigError(
                f"train.lora.target_modules: {target!r}: is taken for a layer of experts, which are not adapted, nor "
                "are other layers of such names: leave it out"
            )
        if not found or not found <= linear:
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            what = "the model has no such module" if not found else f"{min(found)} is none that is adapted"
            raise ConfigError(f"train.lora.target_modules: {target!r}: {what}; linear layers are: {there}")


def _linear_names(model: Any) -> set[str]:
    apart = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    named = model.named_modules()
    return {name for name, each in named if isinstance(each, torch.nn.Linear) and id(each) not in apart}


def _all_linear(model: Any) -> str | list[str]:
    """Return peft's name of all linear layers; of a mixture of experts, theirs beside the experts."""
    if num_experts_of(model) is None:
        return _ALL_LINEAR
    return sorted({name.rpartition(".")[2] for name in _linear_names(model)} - _OF_EXPERTS)


def check_peft() -> None:
    """Raise ConfigError where peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ConfigError("train.lora needs peft, which is not installed: pip install 'rollfeed[lora]'") from None


class AdaptedNames(CheckpointNames):
    """Gives a model an adapter, which alone is trained from then on; its tensors are then merged ones.

    Args:
        model: As transformers loaded it.
        stored: The names of the checkpoint's tensors.
        rank: Of the adapter.
        alpha: Its scale, times the rank.
        target_modules: The modules that are adapted, by the ends of their names, or ``all-linear``.

    Raises:
        ConfigError: If peft is not installed, or a module is not there or cannot be adapted.
    """

    def __init__(
        self, model: Any, stored: Mapping[str, Any], *, rank: int, alpha: int, target_modules: Sequence[str]
    ) -> None:
        check_peft()
        from peft import LoraConfig, inject_adapter_in_model

        check_targets(model, target_modules)
        targets: Any = list(target_modules)
        self.config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=_all_linear(model) if targets == [_ALL_LINEAR] else targets,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            inject_adapter_in_model(self.config, model, _ADAPTER)
        super().__init__(model, stored)
        layers = {layer.base_layer.weight.data_ptr(): layer for layer in adapted_layers(model)}
        places = {tensor.data_ptr(): name for name, tensor in self.unchanged.items()}
        if lost := layers.keys() - places.keys():
            shape = tuple(layers[min(lost)].base_layer.weight.shape)
            raise ConfigError(
                f"train.lora.target_modules: a layer of shape {shape} is stored in another form in the checkpoint, and "
                "cannot be merged there: name other modules"
            )
        self._layers = {places[pointer]: layer for pointer, layer in layers.items()}
        names = {id(module): name for name, module in model.named_modules()}
        self._halves = {
            place: tuple(f"{_PREFIX}{names[id(layer)]}.lora_{half}.weight" for half in "AB")
            for place, layer in self._layers.items()
        }
        own, whole = (sum(each.numel() for each in held) for held in (self.adapter().values(), model.parameters()))
        _log.info("train.lora: %s parameters are trained, %.2g %% of the model's", f"{own:,}", 100 * own / whole)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the checkpoint, each merged with the adapter when it is asked for."""
        return MergedTensors(super().tensors(), self._layers, self.write_adapter)

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter's own tensors, by the names of peft's files."""
        return {
            _PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter.detach()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def merged(self, tensors: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return some of the checkpoint's tensors as :meth:`tensors` has them.

        They are given without the adapter, and so is that, as :meth:`adapter` names it: where the model's own are
        spread over processes, these are whole.
        """
        halves = {name: tuple(adapter[half] for half in self._halves[name]) for name in tensors.keys() & self._halves}
        return dict(MergedTensors(tensors, self._layers, self.write_adapter, halves=halves))

    def write_adapter(self, folder: Path, *, base: Path, adapter: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter into a folder as peft does; ``base`` is the model's own.

        The files are ``adapter_model.safetensors`` and ``adapter_config.json``; ``adapter`` are the tensors, by default
        the model's.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        copies = {name: tensor.contiguous().cpu() for name, tensor in (adapter or self.adapter()).items()}
        save_file(copies, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
        told = copy(self.config)
        told.base_model_name_or_path = str(base)
        told.save_pretrained(str(folder))

    def _state(self) -> dict[str, Tensor]:
        """Return the model's tensors under the names that they had without the adapter."""
        state = super()._state()
        return {name.replace(".base_layer.", "."): each for name, each in state.items() if ".lora_" not in name}


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint; adapted ones, and those held in bf16, are made each time, in memory of their own."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        layers: Mapping[str, Any],
        write_adapter: Callable[..., None],
        *,
        halves: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self.write_adapter = write_adapter
        """Writes the adapter alone: :meth:`AdaptedNames.write_adapter`."""
        self._tensors = tensors
        self._layers = layers
        self._halves = halves or {}

    def __getitem__(self, name: str) -> Tensor:
        tensor, layer = self._tensors[name], self._layers.get(name)
        if layer is not None:
            return merged(layer, tensor, halves=self._halves.get(name))
        return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def merged(layer: Any, weight: Tensor, *, halves: Sequence[Tensor] | None = None) -> Tensor:
    """Return an adapted layer's weight with what its adapter adds, in the type of the adapter.

    ``halves`` are the two matrices of the adapter, by default the layer's.
    """
    first, second = halves or (each[_ADAPTER].weight for each in (layer.lora_A, layer.lora_B))
    with torch.no_grad():
        total: Tensor = weight.detach() + (second @ first) * layer.scaling[_ADAPTER]
    return total


def adapted_layers(model: Any) -> list[Any]:
    """Return the layers of a model that have an adapter, each with its own as ``base_layer``."""
    return [each for each in model.modules() if hasattr(each, "lora_A") and hasattr(each, "base_layer")]


def adapter_of(model: Any) -> dict[str, Any] | None:
    """Return rank, scale and modules of a model's adapter, as JSON values; None where it has none."""
    config = getattr(model, "peft_config", {}).get(_ADAPTER)
    if config is None:
        return None
    modules = sorted({name.rpartition(".")[2] for name in config.target_modules})
    return {"rank": config.r, "alpha": config.lora_alpha, "target_modules": modules}


def refuse_other_adapter(found: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    """Compare the adapter that a trainer's state is of with that of its model.

    Raises:
        CheckpointError: If they differ.
    """
    if found == own:
        return
    if found is None or own is None:
        theirs, ours = (
            "all weights" if each is None else f"an adapter of rank {each['rank']}" for each in (found, own)
        )
    else:
        key = next(key for key in own if own[key] != found.get(key))
        theirs, ours = (f"an adapter with {key} = {each.get(key)}" for each in (found, own))
    raise CheckpointError(
        f"the trainer's state is of training {theirs}, and this is one of {ours}: set train.lora as it was, or begin "
        "anew"
    )


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Have the model compute without its adapter; one that has none computes as ever."""
    layers = adapted_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class PastAdapter:
    """The adapter as it was, put back for some passes; a new one adds nothing, which is the model without it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.take()

    def take(self) -> None:
        """Keep the adapter as it is now."""
        trained = self._model.named_parameters()
        self.tensors = {name: each.detach().clone() for name, each in trained if each.requires_grad}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model compute with it; passes have no gradient then."""
        present = {name: self._model.get_parameter(name).detach().clone() for name in self.tensors}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(present)

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values where the model has its own: what is spread over processes is gathered from there."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._model.get_parameter(name).copy_(tensor)
