"""Numbers under slime's names, and the forms of results by what the process has installed."""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.integration.slime_caller import Source, arguments, eval_set

from rollfeed.app.inside_slime import slime_process
from rollfeed.app.inside_slime.slime_numbers import pass_rates, sample_numbers
from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample
from rollfeed.compat.slime_rollout import generate_rollout

ARGS = Namespace(advantage_estimator="grpo")


def answered(group: int, reward: Any, **values: Any) -> SlimeSample:
    sample = SlimeSample(group_index=group, reward=reward, **{"response_length": 10, "response": "x" * 10, **values})
    sample.status = SlimeSample.Status.TRUNCATED if group == 0 else SlimeSample.Status.COMPLETED
    return sample


def test_numbers_of_samples_have_slimes_names_and_meaning() -> None:
    samples = [
        answered(0, {"score": 1.0}, response_length=4, loss_mask=[1, 1, 1, 0]),
        answered(0, {"score": 1.0}, response="ab" * 6000),
        answered(1, {"score": 0.0}, response="".join(map(chr, Random(0).choices(range(40, 120), k=12000)))),
        answered(1, {"score": 1.0}, response_length=20),
        answered(2, {"score": -0.04}),
        answered(2, {"score": -0.04}),
    ]
    samples[0].prefix_cache_info.add({"cached_tokens": 3, "prompt_tokens": 4})
    assert sample_numbers(ARGS, samples, reward_key="score") == {
        "response_len/mean": pytest.approx(63 / 6),
        "response_len/median": 10.0,
        "response_len/max": 20.0,
        "response_len/min": 3.0,
        "zero_std/count_1.0": 1.0,
        "zero_std/count_-0.0": 1.0,
        "repetition_frac": pytest.approx(1 / 6),
        "truncated_ratio": pytest.approx(2 / 6),
        "prefix_cache_hit_rate": 0.75,
        "avg_cached_tokens_per_sample": 0.5,
    }
    ppo = sample_numbers(Namespace(advantage_estimator="ppo"), samples, reward_key="score")
    assert not any(name.startswith("zero_std") for name in ppo)


def test_pass_rates_count_rewards_of_1() -> None:
    groups = [[SlimeSample(reward=each) for each in rewards] for rewards in ([1, 0.5, 0, 0], [1, 1, 1, 1])]
    assert pass_rates(groups, reward_key=None) == {"pass@1": 0.625, "pass@2": 0.75, "pass@4": 1.0}
    assert pass_rates([groups[0][:1], groups[0][1:2]], reward_key=None) == {}


_TYPES = """
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

@dataclass
class Sample:
    group_index: int = None
    index: int = None
    prompt: Any = ""
    tokens: list = field(default_factory=list)
    multimodal_inputs: dict = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list = None
    weight_versions: list = field(default_factory=list)
    rollout_log_probs: list = None
    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)

    @property
    def effective_response_length(self):
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)
"""
_RUN = """
import asyncio, threading
LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, name="theirs", daemon=True).start()

def run(work):
    return asyncio.run_coroutine_threadsafe(work, LOOP).result()
"""
_FORMS = """
class RolloutFnTrainOutput:
    def __init__(self, samples, metrics=None):
        self.samples, self.metrics = samples, metrics
"""


@pytest.fixture(params=["slime", "miles"])
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package of that name, an old one: no forms of results."""
    folder = tmp_path / request.param
    for name, text in {"__init__.py": "", "utils/types.py": _TYPES, "utils/async_utils.py": _RUN}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "utils" / "__init__.py").touch()
    (folder / "rollout").mkdir()
    (folder / "rollout" / "__init__.py").touch()
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("slime", "miles")}
    monkeypatch.syspath_prepend(tmp_path)
    slime_process.end()  # it has the loop of before
    yield folder
    slime_process.end()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "miles")]:
        del sys.modules[name]
    sys.modules.update(before)


async def where(args: Namespace, sample: Any) -> dict[str, float]:
    assert threading.current_thread().name == "theirs"
    return {"odd": 1.0}


def test_an_installed_package_has_its_loop_its_samples_and_its_forms(
    package: Path, router: str, checkpoint: Path, tmp_path: Path
) -> None:
    sample = __import__(f"{package.name}.utils.types").utils.types.Sample

    class TheirSource(Source):
        def get_samples(self, num_samples: int) -> list[list[Any]]:
            return [
                [sample(group_index=group, index=member, prompt=f"Question {group}") for member in range(2)]
                for group in range(num_samples)
            ]

    args = arguments(router, checkpoint, rollout_max_context_len=300, rollout_max_response_len=20)
    args.rollout_top_p = 0.9  # older ones train without what was kept
    args.custom_rm_path = f"{__name__}.where"
    groups = generate_rollout(args, 0, TheirSource())
    assert [[type(each) for each in group] for group in groups] == [[sample, sample]] * 3
    assert all(each.loss_mask is None for group in groups for each in group)
    (package / "rollout" / "base_types.py").write_text(_FORMS)
    output = generate_rollout(args, 1, TheirSource())
    assert type(output).__module__ == f"{package.name}.rollout.base_types"
    assert output.metrics["rollout/raw_reward"] == 1.0
    assert len(output.samples) == 3


def test_without_either_package_results_have_the_supplied_form(
    router: str, checkpoint: Path, tmp_path: Path, source: Source
) -> None:
    sets = [eval_set(tmp_path / "a.jsonl", max_response_len=3)]
    args = arguments(router, checkpoint, rollout_max_context_len=300, rollout_max_response_len=20, eval_datasets=sets)
    output = generate_rollout(args, 0, source)
    names = {
        *(f"rollout/response_len/{name}" for name in ("mean", "median", "max", "min")),
        *("rollout/raw_reward", "rollout/truncated", "rollout/truncated_ratio", "rollout/repetition_frac"),
        *("rollout/zero_std/count_0.0", "passrate/pass@1", "passrate/pass@2", "rollout/prefix_cache_hit_rate"),
    }
    assert names <= output.metrics.keys()
    args.custom_rm_path, args.reward_key = None, None
    result = generate_rollout(args, 0, source, evaluation=True)
    assert {"eval/numbers/truncated_ratio", "eval/numbers/repetition_frac"} <= result.metrics.keys()
