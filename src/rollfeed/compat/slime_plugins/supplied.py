"""The names that slime's plug-ins import, where neither slime nor miles is installed.

A finder stands behind all others: what is installed goes before it, and what is not supplied is said by name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = ("slime", "miles")
_HERE = "rollfeed.compat.slime_plugins.names"
_TYPES, _ROLLOUT, _ENGINE = f"{_HERE}.slime_sample", f"{_HERE}.sglang_rollout", f"{_HERE}.engine_calls"
_REWARDS, _FORMS, _SOURCES, _HELP = f"{_HERE}.rm_hub", f"{_HERE}.forms", f"{_HERE}.data", f"{_HERE}.helpers"
_AGENT = "rollfeed.compat.slime_plugins.agent"
_ADAPTERS, _HARNESS = ("AnthropicAdapter", "OpenAIAdapter"), ("BaseHarness", "HarnessContext")
_GENERATING = (
    "GenerateState",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "abort",
    "eval_rollout",
    "generate_rollout",
    "generate_rollout_async",
    "generate_abortable_samples",
)
_DATA_SOURCES = ("DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first")

SUPPLIED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "utils.types": {_TYPES: ("Sample",)},
    "utils.misc": {_HELP: ("load_function", "SingletonMeta")},
    "utils.http_utils": {_ENGINE: ("post", "get")},
    "utils.async_utils": {_HELP: ("run",)},
    "utils.processing_utils": {
        _HELP: ("load_tokenizer", "load_processor", "build_processor_kwargs", "encode_image_for_rollout_engine")
    },
    "utils.mask_utils": {_HELP: ("MultiTurnLossMaskGenerator",)},
    "utils.data": {_SOURCES: ("Dataset", "read_file")},
    "rollout.base_types": {
        _FORMS: (
            "RolloutFnTrainOutput",
            "RolloutFnEvalOutput",
            "call_rollout_fn",
            "GenerateFnInput",
            "GenerateFnOutput",
        )
    },
    "rollout.filter_hub.base_types": {
        _FORMS: (
            "DynamicFilterOutput",
            "call_dynamic_filter",
            "should_drop_dynamic_filter_output",
            "MetricGatherer",
        )
    },
    "rollout.filter_hub.dynamic_sampling_filters": {
        _FORMS: ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback")
    },
    "rollout.filter_hub.over_sampling_filters": {_FORMS: ("sort_by_reward_std",)},
    "rollout.rm_hub": {
        _REWARDS: ("async_rm", "batched_async_rm", "grade_answer_verl", "get_deepscaler_rule_based_reward")
    },
    "rollout.rm_hub.math_dapo_utils": {_REWARDS: ("compute_score",)},
    "rollout.rm_hub.math_utils": {_REWARDS: ("extract_answer", "grade_answer_verl")},
    "rollout.rm_hub.deepscaler": {_REWARDS: ("get_deepscaler_rule_based_reward",)},
    "rollout.sglang_rollout": {_ROLLOUT: _GENERATING, _ENGINE: ("get_model_url",)},
    "rollout.sft_rollout": {_ROLLOUT: ("generate_rollout",)},
    "rollout.data_source": {_SOURCES: _DATA_SOURCES},
    "ray.rollout_data_source": {_SOURCES: _DATA_SOURCES},
    "agent.adapters": {f"{_AGENT}.gateway_adapters": _ADAPTERS},
    "agent.adapters.anthropic": {f"{_AGENT}.gateway_adapters": _ADAPTERS[:1]},
    "agent.adapters.openai": {f"{_AGENT}.gateway_adapters": _ADAPTERS[1:]},
    "agent.adapters.common": {f"{_AGENT}.gateway_adapters": ("flatten_content",)},
    "agent.aiohttp_threaded": {f"{_AGENT}.app_thread": ("run_app_in_thread", "AppHandle", "FilteredAccessLogger")},
    "agent.harness": {f"{_AGENT}.harness": (*_HARNESS, "ClaudeCodeHarness", "CodexHarness", "CLAUDE_CODE", "CODEX")},
    "agent.harness.common": {f"{_AGENT}.harness": (*_HARNESS, "run_agent")},
    "agent.sandbox": {
        f"{_AGENT}.sandboxes": (
            "Sandbox",
            "E2BSandbox",
            "make_sandbox",
            "ensure_agent_user",
            "exec_and_wait",
            "EXIT_TIME_BUDGET_EXCEEDED",
        )
    },
}
"""By module, below ``slime`` and ``miles`` alike: which names come from which module of ours."""


class NotSuppliedError(ImportError):
    """A name of slime that a plug-in imports and that there is no counterpart of."""


def names_of(module: str) -> dict[str, str]:
    """Return the names that a module below the packages supplies, each with our module that has it."""
    return {name: place for place, names in SUPPLIED.get(module, {}).items() for name in names}


def is_known(module: str) -> bool:
    """Whether a module is supplied, or holds one that is."""
    return module == "" or any(each == module or each.startswith(f"{module}.") for each in SUPPLIED)


class _SuppliedModule(ModuleType):
    """Its names are looked up when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package, _, below = self.__name__.partition(".")
        place = names_of(below).get(name)
        if place is not None:
            return getattr(importlib.import_module(place), name)
        if is_known(f"{below}.{name}".strip(".")):
            return importlib.import_module(f"{self.__name__}.{name}")
        supplied = ", ".join(sorted(names_of(below))) or "nothing"
        raise NotSuppliedError(
            f"{self.__name__}.{name} is not supplied ({package} is not installed); {self.__name__} has {supplied}: "
            "see docs/slime-plugins.md"
        )


class _Supplier(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package not in PACKAGES or (below and not isinstance(sys.modules.get(package), _SuppliedModule)):
            return None
        if not is_known(below):
            near = ", ".join(sorted(each for each in SUPPLIED if each.startswith(below.partition(".")[0])))
            raise NotSuppliedError(
                f"{fullname} is not supplied ({package} is not installed); there is {near or ', '.join(SUPPLIED)}: "
                "see docs/slime-plugins.md"
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _SuppliedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


_SUPPLIER = _Supplier()


def is_supplied(package: str) -> bool:
    """Whether a package is not installed, and its names are ours."""
    spec = find_spec(package)
    return spec is None or isinstance(spec.loader, _Supplier)


def supply_names() -> None:
    """Have plug-ins find slime's names, those of an installed slime first."""
    if _SUPPLIER not in sys.meta_path:
        sys.meta_path.append(_SUPPLIER)


def sample_class() -> Any:
    """Return the class of the samples that plug-ins are handed: the installed slime's, or ours."""
    supply_names()
    return importlib.import_module("slime.utils.types").Sample
