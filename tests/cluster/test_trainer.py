"""A training whose trainer is in a process elsewhere: the same files, also when that process is killed."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cluster.process_hosting import ProcessHosting

from rollfeed import app
from rollfeed.app.build import prepare
from rollfeed.app.cluster import cluster_engine
from rollfeed.app.training.remote_trainer import RemoteTrainer
from rollfeed.app.training.trainers import _gpus, make_trainer, trainer_of
from rollfeed.cluster import Host, HostDiedError, Hosted, Hosting
from rollfeed.cluster.hosting import returned
from rollfeed.config import RunSpec, Settings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.store import RunReader
from rollfeed.training.supervised import Demonstration, SupervisedUpdates

REWARD = """
def score(sample, prompt):
    return float(sample.response_token_ids.sum() % 7)
"""


def spec_for(folder: Path, checkpoint: Path, **changed: dict[str, Any]) -> RunSpec:
    tree: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": str(checkpoint)},
        "prompts": {"environments": [{"id": "core/copy_text", "apply_chat_template": False}]},
        "rollout": {"num_rollout": 4, "rollout_batch_size": 3, "n_samples_per_prompt": 2, "deterministic": True},
        "sampling": {"rollout_max_response_len": 12},
        "engine": {"context_length": 256, "kernels": "torch", "precision": "fp32"},
        "train": {
            "checkpoint_interval": 2,
            "threads": 1,
            "optimizer": {"learning_rate": 0.01},
            "loss": {"kl_coefficient": 0.1, "reward_kl_coefficient": 0.1, "reference_refresh_interval": 3},
        },
        "reward": {"override_environments": True, "functions_in_workers": False, "overlong": {"cache": 10}},
        "plugins": {"reward": "trainer_elsewhere_reward:score"},
        "cluster": {"kind": "ray", "num_workers": 1, "startup_timeout_seconds": 600},
    }
    for name, values in changed.items():
        tree[name] = {**tree.get(name, {}), **values}
    return RunSpec(Settings.model_validate({"seed": 3, **tree}), (folder,))


@pytest.fixture(autouse=True)
def reward(tmp_path: Path) -> None:
    (tmp_path / "trainer_elsewhere_reward.py").write_text(REWARD)


@pytest.fixture
def host(fork_rollfeed: object) -> Callable[[], ProcessHosting]:
    return partial(ProcessHosting, multiprocessing.get_context("forkserver"))


class HereHost(Host):
    """Calls the object in this process, until it is killed."""

    name = "trainer"

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted
        self.is_dead = False

    async def call(self, method: str, *args: Any) -> Any:
        if self.is_dead:
            raise HostDiedError("trainer: killed")
        return returned(await self._hosted.call(method, *args))

    def kill(self) -> None:
        self.is_dead = True


class HereHosting(Hosting):
    """One place, in this process."""

    num_nodes = 1

    async def __aenter__(self) -> HereHosting:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def reserve(self, num_places: int) -> None: ...

    async def start(self, factory: str, *args: Any, place: int | None) -> HereHost:
        self.host = HereHost(Hosted(factory, *args))
        return self.host

    def share(self, value: Any) -> Any:
        return value


def files_of(run: Path) -> dict[str, bytes]:
    """Batches, the trainer's states and figures without times, and the trained model."""
    found = sorted(path for name in ("batches", "checkpoints", "model") for path in (run / name).rglob("*.*"))
    content = {str(path.relative_to(run)): path.read_bytes() for path in found if path.is_file()}
    lines = (run / "train.jsonl").read_text().splitlines()
    return {**content, "train.jsonl": "\n".join(line.split(', "seconds"')[0] for line in lines).encode()}


@pytest.fixture
def local(tmp_path: Path, tiny_checkpoint: Path) -> dict[str, bytes]:
    asyncio.run(
        app.train(prepare(spec_for(tmp_path, tiny_checkpoint, cluster={"kind": "local"})), out=tmp_path / "local")
    )
    return files_of(tmp_path / "local")


def test_a_trainer_elsewhere_leaves_the_files_of_one_here_also_when_it_is_killed(
    host: Callable[[], ProcessHosting], tmp_path: Path, tiny_checkpoint: Path, local: dict[str, bytes]
) -> None:
    spec, out = spec_for(tmp_path, tiny_checkpoint), tmp_path / "run"
    trainers: list[ProcessHosting] = []
    steps: list[int] = []

    def kill(step: Any) -> None:
        steps.append(step.step)
        if step.step == 2 and len(trainers) == 1:
            trainers[0].hosts[0].kill()

    async def train() -> None:
        prepared = prepare(spec)
        prepared = replace(prepared, engine=cluster_engine(prepared.spec, prepared.engine, hosting=host()))
        trainers.append(host())
        try:
            await app.train(prepared, out=out, on_step=kill, trainer_hosting=trainers[-1])
        finally:
            assert trainers[-1].is_left

    with pytest.raises(HostDiedError, match=r"the trainer is lost: .*; the same command goes on at step 2 from .*"):
        asyncio.run(train())
    with RunReader(out) as reader:
        assert reader.steps()[-1].step == 3  # the batch that it was to train on is committed, and made again
    asyncio.run(train())
    assert steps == [0, 1, 2, 2, 3]
    found = files_of(out)
    assert {name: found.get(name) == content for name, content in local.items()} == dict.fromkeys(found, True)


def on_trainer(
    spec: RunSpec, out: Path, work: Callable[[RemoteTrainer, HereHost], Any], *, loaded: Path | None = None
) -> Any:
    """Do something with a remote trainer, in a thread."""

    async def go() -> Any:
        hosting = HereHosting()
        async with trainer_of(prepare(spec), out, hosting) as trainer:
            assert isinstance(trainer, RemoteTrainer)
            return await asyncio.to_thread(work, trainer, hosting.host)

    return asyncio.run(go())


def test_demonstrations_are_learned_from_there_as_here(tmp_path: Path, tiny_checkpoint: Path) -> None:
    shown = [Demonstration(np.arange(3, 9, dtype=np.int32), np.arange(20, 24, dtype=np.int32))]
    spec = spec_for(tmp_path, tiny_checkpoint)

    def teach(trainer: RemoteTrainer, host: HereHost) -> tuple[float, dict[str, Any]]:
        updates = trainer.supervised(learning_rate=0.01, micro_batch_tokens=64)
        updates.update(shown)
        return updates.update(shown), {name: each.numpy().copy() for name, each in trainer.weights().items()}

    loss, weights = on_trainer(spec, tmp_path / "run", teach)
    here = make_trainer(prepare(spec))
    updates = SupervisedUpdates(here.policy, learning_rate=0.01, micro_batch_tokens=64)
    updates.update(shown)
    assert loss == updates.update(shown)
    assert all(np.array_equal(weights[name], each.detach().numpy()) for name, each in here.weights().items())


def test_a_batch_that_fails_after_an_update_leaves_no_state_to_save(
    tmp_path: Path, tiny_checkpoint: Path, local: dict[str, bytes]
) -> None:
    with RunReader(tmp_path / "local") as reader:
        batch = reader.batch(0)
    advantages = np.where(np.arange(len(batch.samples)) < 2, [1.0, -1.0] * 3, np.nan).astype(np.float32)
    broken = replace(batch, advantages_S=advantages)
    spec = spec_for(tmp_path, tiny_checkpoint, train={"num_minibatches": 3, "loss": {"kl_coefficient": 0.1}})

    def fail(trainer: RemoteTrainer, host: HereHost) -> None:
        with pytest.raises(RunFailedError, match="not finite"):
            trainer.train_step(broken)
        assert (trainer.step, trainer.is_mid_batch) == (0, True)
        trainer.load(tmp_path / "local" / "checkpoints" / "step-000001")
        assert (trainer.step, trainer.is_mid_batch) == (2, False)
        trainer.train_step(batch)
        assert trainer.step == 3
        host.kill()
        with pytest.raises(HostDiedError, match=r"the trainer is lost: trainer: killed$"):
            trainer.weights()
        assert trainer.is_mid_batch

    on_trainer(spec, tmp_path / "run", fail)


def test_a_trainer_that_cannot_be_made_there_ends_the_run_before_it_begins(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    spec = spec_for(tmp_path, tiny_checkpoint, train={"device": "no-such-device"})
    with pytest.raises(ConfigError, match=r"train\.device = 'no-such-device'"):
        on_trainer(spec, tmp_path / "run", lambda trainer, host: None)
    assert not (tmp_path / "run").exists()


def test_the_driver_trains_where_that_is_asked_for(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async def go() -> type:
        spec = spec_for(tmp_path, tiny_checkpoint, cluster={"trainer": "driver"})
        async with trainer_of(prepare(spec), tmp_path, HereHosting()) as trainer:
            return type(trainer)

    assert asyncio.run(go()) is not RemoteTrainer


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [("auto", None, None), ("cpu", None, 0.0), ("cuda:0", None, 1.0), ("auto", 0.5, 0.5), ("cuda", 0.0, 0.0)],
)
def test_the_trainer_gets_a_gpu_where_it_is_to_train_on_one(
    device: str, given: float | None, expected: float | None, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    spec = spec_for(tmp_path, tiny_checkpoint, train={"device": device}, cluster={"trainer_gpus": given})
    assert _gpus(spec.settings) == expected
