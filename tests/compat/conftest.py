import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rollfeed
from rollfeed.compat.slime_plugins import slime_run, with_slime_plugins
from rollfeed.plugins import load_factory
from rollfeed.protocols import PromptSource
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine

EXAMPLES = Path(__file__).parents[2] / "examples" / "slime"
TEXTS = [f"prompt {number}" for number in range(10)]


@pytest.fixture
def write_plugins(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that writes ``mine.py`` and returns its folder."""

    def write(text: str) -> Path:
        (tmp_path / "mine.py").write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    sys.modules.pop("mine", None)
    yield write
    sys.modules.pop("mine", None)


@pytest.fixture
def make_batches() -> Callable[..., Any]:
    """Return an async function that makes batches with a scripted engine; keyword arguments are of ``[plugins]``."""

    async def make(
        num_batches: int = 1,
        *,
        folder: Path = EXAMPLES,
        engine: Any = None,
        rollout: dict[str, Any] | None = None,
        filters: Any = None,
        reward: Any = None,
        source: Any = None,
        max_response_len: int = 8,
        sampling: dict[str, Any] | None = None,
        reward_fn: Any = None,
        rollout_fn: Any = None,
        **plugins: Any,
    ) -> list[Any]:
        plugins |= {} if reward_fn is None else {"reward": reward_fn}
        plugins |= {} if rollout_fn is None else {"rollout": rollout_fn}
        config = rollfeed.RolloutConfig(
            seed=5,
            rollout=rollfeed.RolloutSettings(**{"rollout_batch_size": 3, "n_samples_per_prompt": 4, **(rollout or {})}),
            plugins=rollfeed.PluginSettings(**plugins),
            sampling=rollfeed.SamplingSettings(**{"rollout_max_response_len": max_response_len, **(sampling or {})}),
            **({} if filters is None else {"filters": filters}),
            **({} if reward is None else {"reward": reward}),
        )
        rollouts = rollfeed.open_rollouts(
            config,
            source=source or ListSource(TEXTS, labels=[str(n % 10) for n in range(10)], repeat=True),
            engine=engine or ScriptedEngine(),
            tokenizer=CharTokenizer(),
            folders=[folder],
        )
        async with rollouts:
            return [await rollouts.generate_batch() for _ in range(num_batches)]

    return make


@pytest.fixture
def open_source() -> Callable[..., Any]:
    """Return a function that makes the prompt source that ``[plugins]`` names."""

    def make(folder: Path = EXAMPLES, **plugins: Any) -> Any:
        config = rollfeed.RolloutConfig(
            seed=5,
            rollout=rollfeed.RolloutSettings(rollout_batch_size=3, n_samples_per_prompt=4),
            plugins=rollfeed.PluginSettings(**plugins),
        )
        given = with_slime_plugins(config, folders=[folder]).plugins.prompt_source
        return load_factory(given, PromptSource, CharTokenizer(), key="plugins.prompt_source")

    return make


@pytest.fixture
def make_run() -> Callable[..., Any]:
    """Return a function that sets up a run with a plug-in of slime, and returns what its plug-ins share."""

    def make(**sections: Any) -> Any:
        plugins = {
            "group_filters": ["slime:slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"]
        }
        config = rollfeed.RolloutConfig(plugins=rollfeed.PluginSettings(**plugins), **sections)
        return slime_run(with_slime_plugins(config))

    make()
    return make
