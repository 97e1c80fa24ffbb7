"""Plain reward functions of users, called by their import path in workers that can be killed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollfeed.base.importing import import_in_worker
from rollfeed.errors import RewardError
from rollfeed.protocols import Workers
from rollfeed.rewards.by_name import Takes, by_name
from rollfeed.rewards.calls import OwnPace
from rollfeed.types import Prompt, Sample, Verdict
from rollfeed.types.fields import from_dict, to_dict

_CALL = "rollfeed.rewards.functions.call_function"


def in_workers(
    path: str,
    *,
    takes: Takes,
    label_names: Sequence[str],
    folders: Sequence[Path],
    workers: Workers,
    deadline_seconds: float,
) -> OwnPace:
    """Return the reward function that calls ``module:name`` in a worker.

    A global state of its module is each worker's own. ``label_names`` are as :func:`by_name` takes them.
    """
    places = [str(folder) for folder in folders]

    async def call(first: Any, second: Any) -> Any:
        samples = [first] if takes is Takes.SAMPLE else list(first)
        prompts = list(second) if takes is Takes.SAMPLES else [second]
        # A batch is of one prompt: it is sent once.
        prompts = prompts[:1] if all(prompt is prompts[0] for prompt in prompts) else prompts
        names = list(label_names)
        args = [path, places, takes.value, names, [each.to_dict() for each in samples], list(map(to_dict, prompts))]
        result = await workers.call(_CALL, args, deadline_seconds=deadline_seconds)
        return [_read(each) for each in result] if isinstance(result, list) else _read(result)

    return OwnPace(call)


def call_function(
    path: str, folders: list[str], takes: str, label_names: list[str], samples: list[Any], prompts: list[Any]
) -> Any:
    """Call a reward function and return its result as JSON values; runs in a worker.

    Raises:
        RewardError: If the result is nothing that can be sent back.
    """
    found = import_in_worker(path, key="reward function", folders=folders)
    function = by_name(found, takes=Takes(takes), label_names=label_names)
    made = [Sample.from_dict(sample) for sample in samples]
    asked = [from_dict(Prompt, prompt) for prompt in prompts]
    match Takes(takes):
        case Takes.SAMPLE:
            result = function(made[0], asked[0])
        case Takes.SAMPLES:
            result = function(made, asked * len(made) if len(asked) == 1 else asked)
        case Takes.GROUP:
            result = function(made, asked[0])
    return _plain(result)


def _plain(result: Any) -> Any:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise RewardError("it returned an awaitable: declare it as async def")
    if isinstance(result, Verdict):
        return {"verdict": to_dict(result)}
    if isinstance(result, np.generic | np.ndarray):
        return result.tolist()
    if isinstance(result, Mapping):
        return {"entries": {name: _number(value) for name, value in result.items()}}
    if isinstance(result, list | tuple):
        return [_plain(each) for each in result]
    if result is None or isinstance(result, bool | int | float | str):
        return result
    raise RewardError(f"it returned {result!r:.80}, a {type(result).__name__}; it must be a number")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _read(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    if "verdict" not in result:
        return result["entries"]
    return from_dict(Verdict, result["verdict"])
