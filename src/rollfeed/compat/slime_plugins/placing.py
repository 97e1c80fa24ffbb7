"""``slime:`` paths of ``[plugins]``: found, checked, and in their places as functions of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rollfeed.base.importing import import_object
from rollfeed.compat.slime_plugins.checking import check_call, check_source
from rollfeed.compat.slime_plugins.shared_run import Adapter, SlimeRun, begin
from rollfeed.compat.slime_plugins.slime_args import slime_arguments
from rollfeed.compat.slime_plugins.slime_paths import SLIME, SLIME_DROP, import_path, is_slime_path
from rollfeed.compat.slime_plugins.supplied import supply_names
from rollfeed.config import RolloutConfig
from rollfeed.errors import PluginError
from rollfeed.faults import describe
from rollfeed.plugins import load_plugin
from rollfeed.protocols import RolloutFn

SAMPLE_FILTER = "rollout_sample_filter_path"
"""Key of ``slime_args``."""
C = TypeVar("C", bound=RolloutConfig)


class _Form(NamedTuple):
    """How slime calls a function, and what makes one of ours of it."""

    parameters: tuple[str, ...]
    adapter: type[Adapter]
    allows_async: bool = False
    allows_miles: bool = False
    """Whether miles's form of it is taken, too."""
    dropping: type[Adapter] | None = None
    """Makes one of a function whose True means drop."""


@cache
def _forms() -> Mapping[str, _Form]:
    """Return the forms, by key of ``[plugins]``, and of ``slime_args``."""
    # Imported here: runs without plug-ins of slime start without what these need.
    from rollfeed.compat.slime_plugins import adapters
    from rollfeed.compat.slime_plugins.generating import SlimeGenerate
    from rollfeed.compat.slime_plugins.stepping import SlimeRollout, SlimeSampleFilter

    return {
        "generate": _Form(("args", "sample", "sampling_params"), SlimeGenerate, allows_async=True, allows_miles=True),
        "rollout": _Form(("args", "rollout_id", "data_source"), SlimeRollout, allows_async=True),
        "reward": _Form(("args", "sample"), adapters.SlimeReward, allows_async=True),
        "batched_reward": _Form(("args", "samples"), adapters.SlimeBatchedReward, allows_async=True),
        "group_reward": _Form(("args", "samples"), adapters.SlimeGroupReward, allows_async=True),
        "group_filters": _Form(("args", "samples"), adapters.SlimeGroupFilter, dropping=adapters.SlimeDropFilter),
        "batch_filter": _Form(("args", "groups"), adapters.SlimeBatchFilter),
        "buffer_policy": _Form(("args", "rollout_id", "buffer", "num_samples"), adapters.SlimeBufferPolicy),
        "sample_hook": _Form(("args", "sample"), adapters.SlimeSampleHook, allows_async=True),
        "advantage": _Form(("args", "samples"), adapters.SlimeAdvantage),
        SAMPLE_FILTER: _Form(("args", "groups"), SlimeSampleFilter),
    }


def with_slime_plugins(config: C, *, folders: Sequence[Path] = ()) -> C:
    """Return settings with functions in the place of ``slime:`` paths; without any, the same object.

    Args:
        config: The run's.
        folders: Searched for modules besides the installed packages.

    Raises:
        PluginError: If one cannot be found, is called otherwise by slime, imports a name that is not supplied, or reads
            an argument that has no counterpart; with file and line.
    """
    plugins, named = config.plugins, config.reward.functions
    given = {name: value for name in type(plugins).model_fields if _has_slime(value := getattr(plugins, name))}
    sample_filter = plugins.slime_args.get(SAMPLE_FILTER) if not isinstance(plugins.rollout, Adapter) else None
    if not given and not sample_filter and not _has_slime(tuple(named.values())):
        return config
    run = begin(
        SlimeRun(
            args=slime_arguments(config),
            params=config.sampling.params,
            context_length=_context_length(config),
            scores_lists=plugins.batched_reward is not None,
            folders=folders,
        )
    )
    supply_names()
    made = {name: _made(value, name, run, folders) for name, value in given.items()}
    if sample_filter:
        key = f"plugins.slime_args.{SAMPLE_FILTER}"
        made_filter = _adapted(f"{SLIME}{sample_filter}", _forms()[SAMPLE_FILTER], run, key=key, folders=folders)
        step = made.get("rollout", plugins.rollout)
        vars(made_filter)["inner"] = load_plugin(step, RolloutFn, key="plugins.rollout", folders=folders)
        made["rollout"] = made_filter
    functions = {
        name: _adapted(path, _forms()["reward"], run, key=f"reward.functions.{name}", folders=folders)
        for name, path in named.items()
        if isinstance(path, str) and is_slime_path(path)
    }
    reward = config.reward.model_copy(update={"functions": {**named, **functions}})
    return config.model_copy(update={"plugins": plugins.model_copy(update=made), "reward": reward})


def _has_slime(value: Any) -> bool:
    return any(map(is_slime_path, value if isinstance(value, tuple) else (value,)))


def _made(value: Any, name: str, run: SlimeRun, folders: Sequence[Path]) -> Any:
    """Return what stands in the place of a value of ``[plugins]``."""
    key = f"plugins.{name}"
    if name == "prompt_source":
        from rollfeed.compat.slime_plugins.sourcing import SlimeSource

        factory = _imported(value, key=key, folders=folders)
        check_call(factory, ("args",) if isinstance(factory, type) else ("num_samples",), key=_named(key, value))
        check_source(factory, run.args, key=_named(key, value))
        return partial(SlimeSource, factory, run)
    if name not in _forms():
        raise PluginError(f"{key} = {value!r}: slime has no such function: name one of ours")
    adapt = partial(_adapted, form=_forms()[name], run=run, key=key, folders=folders)
    if isinstance(value, tuple):
        return tuple(adapt(each) if is_slime_path(each) else each for each in value)
    return adapt(value)


def _adapted(path: str, form: _Form, run: SlimeRun, *, key: str, folders: Sequence[Path]) -> Adapter:
    where, adapter = _named(key, path), form.adapter
    if path.startswith(SLIME_DROP):
        if form.dropping is None:
            raise PluginError(f"{where}: slime_drop: is for group_filters: write slime:")
        adapter = form.dropping
    function = _imported(path, key=key, folders=folders)
    check_call(function, form.parameters, key=where, allows_async=form.allows_async, allows_miles=form.allows_miles)
    check_source(function, run.args, key=where)
    return adapter(function, run, key=key)


def _imported(path: str, *, key: str, folders: Sequence[Path]) -> Any:
    """Return what a path names.

    Raises:
        PluginError: If that cannot be imported, with file and line of what cannot.
    """
    inner = import_path(path)
    try:
        return import_object(inner, key=key, folders=folders)
    except PluginError as error:
        told = str(error).removeprefix(f"{key} = {inner!r}: ")
        told = told if error.__cause__ is None else f"importing it failed: {describe(error.__cause__)}"
        raise PluginError(f"{_named(key, path)}: {told}") from error.__cause__


def _named(key: str, path: str) -> str:
    return f"{key} = {path!r}"


def _context_length(config: RolloutConfig) -> int:
    engine = getattr(config, "engine", None)
    return config.sampling.rollout_max_context_len or (1 << 31 if engine is None else engine.context_length)


def slime_run(config: RolloutConfig) -> SlimeRun | None:
    """Return what the slime plug-ins of settings share; None where there are none."""
    plugins = config.plugins
    values = [getattr(plugins, name) for name in type(plugins).model_fields if name != "slime_args"]
    flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    flat += list(config.reward.functions.values())
    for each in (each for each in flat if isinstance(each, Adapter | partial)):
        if isinstance(each, Adapter):
            return each.run
        if found := [argument for argument in each.args if isinstance(argument, SlimeRun)]:  # of a prompt source
            return found[0]
    return None
