"""Lets SGLang start where packages are missing that it imports and, as the tests start it, never uses.

Python imports this module by itself when its folder is on ``PYTHONPATH``. Modules that are installed are left alone.
``STAND_INS`` names others instead, for vLLM: these can be imported, and transformers, which would use them, is told
that they are not there.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ASKED_FOR = os.environ.get("STAND_INS", "").split()
NOT_NEEDED = frozenset(
    ASKED_FOR
    or (
        *("IPython", "flashinfer", "jsonschema", "loguru", "modelscope", "opentelemetry", "soundfile"),
        *("torchaudio", "torchvision", "xgrammar"),
    )
)
TRULY_ABSENT = frozenset({"flashinfer.norm"})  # is asked for to choose between kernels


def _is_python_own(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_transformers_looking() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_is_package_available":
            return True
    return False


class Anything:
    """Can be called, indexed, looped over, joined in type hints, inherited from and validated, to no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        if _is_python_own(name):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return Anything()

    def __getitem__(self, key: Any) -> Any:
        del key
        return Anything()

    def __iter__(self) -> Any:
        return iter([])

    def __or__(self, other: Any) -> Any:
        del other
        return object

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> Any:
        del bases
        return (object,)

    def __get_pydantic_core_schema__(self, *args: Any) -> Any:
        del args
        from pydantic_core.core_schema import any_schema

        return any_schema()


class EmptyModule(ModuleType):
    """Has every name that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if _is_python_own(name):
            raise AttributeError(name)
        return Anything()


class EmptyModules:
    """Finds and makes them, after every real finder has been asked."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if name in TRULY_ABSENT or name.partition(".")[0] not in NOT_NEEDED:
            return None
        if ASKED_FOR and _is_transformers_looking():
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


sys.meta_path.append(EmptyModules())  # type: ignore[arg-type]


class NothingPinned:
    """Has PyTorch pin no memory once SGLang's adapters are imported, which ask for it without a GPU, too.

    What keeps the experts of tokens asks CUDA itself, and is told that it was done.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        del path, target
        if name not in ("sglang.srt.lora.layers", "sglang.srt.state_capturer.base"):
            return
        import torch

        def unpinned(function: Any) -> Any:
            return lambda *args, pin_memory=False, **others: function(*args, **others)

        done = staticmethod(lambda *_: 0)
        torch.cuda.cudart = lambda: type("", (), {"cudaHostRegister": done, "cudaHostUnregister": done})
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
        torch.tensor, torch.empty, torch.zeros = map(unpinned, (torch.tensor, torch.empty, torch.zeros))


sys.meta_path.insert(0, NothingPinned())  # type: ignore[arg-type]
