"""The model and tokenizer of a TRL trainer, as an engine takes them."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

from rollfeed.app.model import Model
from rollfeed.errors import ConfigError
from rollfeed.prompts import load_tokenizer
from rollfeed.weights.writing import write_some


class TrainedModel:
    """A copy of what a trainer begins with, in a temporary folder, and the tensors that it has now.

    ``with_weights`` says whether the folder needs weights; servers have their own.

    Raises:
        ConfigError: If this process has not all of its model, or it is one for images.
    """

    def __init__(self, trainer: Any, *, with_weights: bool) -> None:
        tokenizer = trainer.processing_class
        if hasattr(tokenizer, "tokenizer"):
            raise ConfigError(f"{type(tokenizer).__name__}: prompts with images cannot be answered, give a tokenizer")
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        for name, parameter in self._model.named_parameters():
            if hasattr(parameter, "ds_id") or type(parameter).__name__ == "FlatParameter":
                raise ConfigError(
                    f"{name}: this process has only a part of it (ZeRO-3, FSDP 1): use DDP, ZeRO-2 or FSDP 2"
                )
        folder = Path(tempfile.mkdtemp(prefix="rollfeed-trl-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for part in (tokenizer, self._model.config, self._model.generation_config):
            part.save_pretrained(folder)
        if with_weights:
            write_some(self.tensors(), folder, checkpoint=None)
        arguments = trainer.args.chat_template_kwargs
        self.model = Model(checkpoint=folder, tokenizer=load_tokenizer(folder, chat_template_kwargs=arguments))
        """What engines are built for."""

    @property
    def state(self) -> int:
        """A number that is another one after every change of its parameters, but for those of fused optimizers."""
        return sum(parameter._version for parameter in self._model.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names of a checkpoint, those of an adapter added to what they adapt.

        They are the trainer's own memory, but for sharded ones, which all processes gather together.
        """
        if not hasattr(self._model, "merge_adapter"):
            return _by_checkpoint(self._model)
        try:
            self._model.merge_adapter()
            return {name: tensor.clone() for name, tensor in _by_checkpoint(self._model, self._model.prefix).items()}
        finally:
            self._model.unmerge_adapter()


def _by_checkpoint(model: Any, adapter: str = "original_module") -> dict[str, Tensor]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if adapter not in name and "original_module" not in name:
            own = name.removeprefix("base_model.model.").replace(".base_layer", "")
            tensor = parameter.detach()
            found[own.replace("modules_to_save.default.", "")] = getattr(
                tensor, "full_tensor", lambda kept=tensor: kept
            )()
    if getattr(model, "_weight_conversions", None):
        from transformers.core_model_loading import revert_weight_conversion

        found = revert_weight_conversion(model, found)
    return found
