import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollfeed import app
from rollfeed.config import RolloutConfig
from rollfeed.store import RunDirectory
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine
from rollfeed.types import Drop, FilterDecision, Keep, Prompt, Sample, StepCommit


def digest(run: Path) -> str:
    total = hashlib.sha256()
    files = sorted((run / "batches").glob("*")) + sorted((run / "dropped").glob("*"))
    assert files
    for path in files:
        total.update(path.name.encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def digit(sample: Sample, prompt: Prompt) -> float:
    return float(sample.response)


def drop_equal(samples: Sequence[Sample]) -> FilterDecision:
    return Drop("equal") if len({sample.reward for sample in samples}) == 1 else Keep()


async def scripted_run(out: Path, *, order: int, in_flight: int, seed: int = 0) -> str:
    config = RolloutConfig(
        seed=seed,
        rollout={
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "over_sampling_factor": 2.0,
            "refill_granularity": 1,
            "deterministic": True,
            "max_requests_in_flight": in_flight,
        },
        plugins={"reward": digit, "group_filters": (drop_equal,)},
    )
    with RunDirectory.open(out, settings={}, identity={}, overwrite=False) as directory:

        def commit(step: StepCommit) -> None:
            directory.commit(step, reward_key=None)

        rollouts = app.open_rollouts(
            config,
            source=ListSource([f"prompt {number}" for number in range(7)], repeat=True),
            engine=ScriptedEngine(random_order=order),
            tokenizer=CharTokenizer(),
            commit=commit,
        )
        async with rollouts:
            for _ in range(4):
                await rollouts.generate_batch()
    return digest(out)


async def test_one_seed_gives_the_same_bytes_whatever_finishes_first(tmp_path: Path) -> None:
    digests = set()
    for repetition in range(10):
        for in_flight in (1, 4, 16):
            out = tmp_path / f"{repetition}-{in_flight}"
            digests.add(await scripted_run(out, order=repetition * 100 + in_flight, in_flight=in_flight))
    assert len(digests) == 1


async def test_another_seed_gives_other_bytes(tmp_path: Path) -> None:
    first = await scripted_run(tmp_path / "a", order=0, in_flight=4, seed=0)
    second = await scripted_run(tmp_path / "b", order=0, in_flight=4, seed=1)
    assert first != second


def test_two_runs_of_the_embedded_engine_are_byte_identical(rollfeed, settings_file, tmp_path: Path) -> None:
    settings = settings_file()

    def run(name: str, *options: str) -> str:
        ran = rollfeed("run", settings, "--out", tmp_path / name, "--set", "rollout.deterministic=true", *options)
        assert ran.code == 0, ran.err
        return digest(tmp_path / name)

    assert run("a") == run("b") == run("c", "--set", "rollout.max_requests_in_flight=1")
    assert run("a2") != run("d", "--set", "seed=6")


@pytest.mark.model
def test_two_runs_of_the_default_model_are_byte_identical(rollfeed, tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text(
        """
[[prompts.environments]]
id = "core/copy_text"
[rollout]
num_rollout = 1
rollout_batch_size = 2
n_samples_per_prompt = 3
over_sampling_batch_size = 3
deterministic = true
[sampling]
rollout_max_response_len = 12
[engine]
num_slots = 9
context_length = 128
"""
    )
    for name, in_flight in (("a", 9), ("b", 2)):
        option = f"rollout.max_requests_in_flight={in_flight}"
        ran = rollfeed("run", settings, "--out", tmp_path / name, "--set", option)
        assert ran.code == 0, ran.err
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
