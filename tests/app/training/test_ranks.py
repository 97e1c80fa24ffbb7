"""A training in several processes: the losses and weights of one, the same checkpoints, and what ends all of them."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollfeed import app
from rollfeed.app.build import prepare
from rollfeed.app.training import trainers
from rollfeed.app.training.checks import check_ranks, check_training
from rollfeed.app.training.trainers import make_trainer
from rollfeed.cluster import HostDiedError, rank_group
from rollfeed.cluster.rank_group import RankGroup
from rollfeed.cluster.rank_process import log_of
from rollfeed.config import ClusterKind, RunSpec, Settings, TinyModelSettings
from rollfeed.config.engine import SGLangSettings
from rollfeed.config.launch import LaunchSettings
from rollfeed.config.train import TrainKind
from rollfeed.engine.tiny import tiny_checkpoint as make_tiny_checkpoint
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.protocols import TransportContext
from rollfeed.store import RunReader
from rollfeed.store.json_text import read_records
from rollfeed.store.layout import ADAPTER, CHECKPOINTS, EXPORTS, METRICS, MODEL, TRAIN_LOG, WARM_UP, WARM_UP_LOG
from rollfeed.types import TensorUpdate
from rollfeed.weights.transports.adapter import AdapterTransport

REWARD = """
def score(sample, prompt):
    # Groups of every second prompt have equal rewards: they are scored without a gradient.
    return float(sample.response_token_ids.sum() % 7) if prompt.token_ids.sum() % 2 else 1.0
"""
LOSS = """
import torch

def loss(inputs):
    ratio_T = torch.exp(inputs.logprobs_T - inputs.old_logprobs_T)
    return -ratio_T * inputs.advantages_T - 0.01 * inputs.entropy_T, {"ratio": ratio_T.detach()}
"""
TOLERANCE = 1e-5
Trained = tuple[list[list[float]], dict[str, Tensor]]
"""Figures of each step, and the weights after the last one, an adapter among them."""
FAULTS = """
import os, signal, time
import torch
from rollfeed.app.inside_cluster.rank_worker import RankWorker

class FaultyRank(RankWorker):
    def _open(self):
        if os.environ.get("TEST_FAULT_OF_RANK_" + os.environ["RANK"]) == "settings":
            self._settings = self._settings.model_copy(update={"seed": 99})
        super()._open()

    async def train_step(self, *args):
        fault = os.environ.get("TEST_FAULT_OF_RANK_" + os.environ["RANK"], "")
        if fault and args[0] == 1:
            if fault.endswith("Error"):
                def fail(*_):
                    raise {"OutOfMemoryError": torch.OutOfMemoryError}.get(fault, MemoryError)("none is left")
                self._trainer._backward = fail
            else:
                os.kill(os.getpid(), getattr(signal, fault))
        return await super().train_step(*args)
"""

TYPES = """
import os
from pathlib import Path
from rollfeed.app.inside_cluster.rank_worker import RankWorker

class TypedRank(RankWorker):
    def _open(self):
        super()._open()
        layers = [each for name, each in self._trainer.policy.model.named_parameters() if "_proj." in name]
        frozen = {f"{each.dtype}: {not each.requires_grad}" for each in layers}
        (Path(os.environ["TEST_TYPES_OF_RANKS"]) / (os.environ["RANK"] + ".txt")).write_text(", ".join(sorted(frozen)))
"""
"""Says in which types linear layers are held, and whether they are frozen."""

PART = """
import asyncio, os

class Part:
    async def wait(self):
        if os.environ["RANK"] == "1":
            await asyncio.Event().wait()

    async def end(self):
        if os.environ["RANK"] == "1":
            os.abort()
        await asyncio.Event().wait()

    async def take(self, given):
        pass
"""
"""An object of ranks of which the second one fails."""


def spec_for(folder: Path, checkpoint: Path, **changed: dict[str, Any]) -> RunSpec:
    tree: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": str(checkpoint)},
        "prompts": {"environments": [{"id": "core/copy_text", "apply_chat_template": False}]},
        "rollout": {"num_rollout": 3, "rollout_batch_size": 3, "n_samples_per_prompt": 3},
        "sampling": {"rollout_max_response_len": 10},
        "engine": {"context_length": 256, "kernels": "torch", "precision": "fp32"},
        "train": {
            "checkpoint_interval": 1,
            "device": "cpu",
            "threads": 1,
            "num_processes": 2,
            "micro_batch_tokens": 256,
            # Where a gradient is next to nothing, its last bits would decide a whole step.
            "optimizer": {"learning_rate": 0.001, "epsilon": 1e-4},
        },
        "reward": {"override_environments": True, "functions_in_workers": False},
        "plugins": {"reward": "ranks_reward:score"},
    }
    for name, values in changed.items():
        tree[name] = {**tree.get(name, {}), **values}
    return RunSpec(Settings.model_validate({"seed": 3, **tree}), (folder,))


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path) -> None:
    (tmp_path / "ranks_reward.py").write_text(REWARD)
    (tmp_path / "ranks_loss.py").write_text(LOSS)


class ForkedRanks(RankGroup):
    """Ranks that are forked from a process which has imported all they need."""

    def _start(self) -> None:
        forks = multiprocessing.get_context("forkserver")
        from rollfeed.base.update_group import listen

        self._store = listen("127.0.0.1", timeout_seconds=60)
        common = {
            **os.environ,
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self._forks = [
            forks.Process(
                target=exec,
                args=(
                    "import os, sys, asyncio\n"
                    "os.environ.update(environment)\n"
                    "sys.path[:] = path\n"
                    "from rollfeed.cluster.rank_process import connect, serve\n"
                    "connection = connect(socket)\n"
                    "connection.send(rank)\n"
                    "asyncio.run(serve(connection))\n"
                    "os._exit(0)\n",
                    {
                        "environment": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        "socket": str(self._folder / "socket"),
                        "rank": rank,
                        "path": list(sys.path),
                    },
                ),
            )
            for rank in range(self._num_ranks)
        ]
        for fork in self._forks:
            fork.start()
        self._pids = {rank: fork.pid or 0 for rank, fork in enumerate(self._forks)}
        self._processes = SimpleNamespace(close=self._kill_forks)

    def _kill_forks(self, *_: object) -> None:
        for fork in self._forks:
            fork.kill()
        for fork in self._forks:
            fork.join()

    def _exit_code(self, rank: int) -> int | None:
        return self._forks[rank].exitcode


def trained_alone(
    folder: Path, checkpoint: Path, out: Path, **changed: Any
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return figures and weights of one process that trains on the batches of a run."""
    alone = {**changed, "train": {**changed.get("train", {}), "num_processes": 1}}
    trainer = make_trainer(prepare(spec_for(folder, checkpoint, **alone)))
    if (out / CHECKPOINTS / WARM_UP).exists():
        trainer.load(out / CHECKPOINTS / WARM_UP)
        trainer.take_as_reference()
    figures = []
    with RunReader(out) as reader:
        for step in reader.steps():
            figures.append(figures_of(trainer.train_step(reader.batch(step.step)).metrics))
    adapter = {} if trainer.adapter is None else trainer.adapter.adapter()
    return figures, {name: tensor.clone() for name, tensor in (*trainer.weights().items(), *adapter.items())}


def records_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / TRAIN_LOG).read_text().splitlines()]


FIGURES = (
    "train/loss",
    "train/grad_norm",
    "train/tokens",
    "train/entropy",
    "train/mismatch_kl",
    "train/policy_ratio_max",
)


def figures_of(record: Mapping[str, Any]) -> list[float]:
    """Return what does not depend on how tokens are packed, 0 for what a batch has not."""
    return [record.get(name, 0.0) for name in FIGURES]


def weights_of(out: Path) -> dict[str, Tensor]:
    adapter = out / MODEL / ADAPTER / "adapter_model.safetensors"
    return {**load_file(out / MODEL / "model.safetensors"), **(load_file(adapter) if adapter.exists() else {})}


def check_equal(out: Path, alone: Trained) -> None:
    figures, weights = alone
    torch.testing.assert_close([figures_of(each) for each in records_of(out)], figures, rtol=1e-5, atol=TOLERANCE)
    ours = weights_of(out)
    assert ours.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=TOLERANCE)


def train(spec: RunSpec, out: Path) -> None:
    asyncio.run(app.train(prepare(spec), out=out))


def state_names(out: Path, step: int) -> list[str]:
    return sorted(load_file(out / CHECKPOINTS / f"step-{step:06d}" / "trainer.safetensors"))


@pytest.fixture
def forked(fork_rollfeed: object, leaves_no_forks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "RankGroup", ForkedRanks)


@pytest.fixture
def leaves_no_forks() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def test_two_processes_train_as_one_does_and_one_goes_on(forked: None, tmp_path: Path, tiny_checkpoint: Path) -> None:
    out, train_settings = tmp_path / "run", {"num_minibatches": 2}
    train(spec_for(tmp_path, tiny_checkpoint, train=train_settings), out)
    check_equal(out, trained_alone(tmp_path, tiny_checkpoint, out, train=train_settings))
    assert any(each.get("train/zero_advantage_tokens") for each in records_of(out))
    more, alone = {"num_rollout": 4}, {**train_settings, "num_processes": 1}
    train(spec_for(tmp_path, tiny_checkpoint, train=alone, rollout=more), out)
    assert state_names(out, 2) == state_names(out, 3)
    check_equal(out, trained_alone(tmp_path, tiny_checkpoint, out, train=alone, rollout=more))


LORA: dict[str, Any] = {
    "lora": {"rank": 3, "alpha": 6},  # of the rows of one half 3 processes have one each, and 2 of them 2 and 1
    "optimizer": {"learning_rate": 0.02, "epsilon": 1e-4},
}
SLOW_LORA: dict[str, Any] = {**LORA, "optimizer": {"learning_rate": 0.001, "epsilon": 1e-4}}
"""For many updates: at the other rate ratios are 3 after ten, and last bits 1e-5 of them."""


def test_two_processes_train_an_adapter_as_one_does_and_one_goes_on(
    forked: None, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    out, train_settings = tmp_path / "run", {**LORA, "loss": {"kl_coefficient": 0.5}}
    train(spec_for(tmp_path, tiny_checkpoint, train=train_settings), out)
    check_equal(out, trained_alone(tmp_path, tiny_checkpoint, out, train=train_settings))
    # The adapter is more than 0, the reference is without it, and the engine has had what was trained.
    assert records_of(out)[2]["train/reference_kl"] > 1e-4
    assert all(each["train/mismatch_kl"] < 1e-6 for each in records_of(out))
    more, alone = {"num_rollout": 4}, {**train_settings, "num_processes": 1}
    train(spec_for(tmp_path, tiny_checkpoint, train=alone, rollout=more), out)
    assert state_names(out, 2) == state_names(out, 3)
    assert all(".lora_" in name for name in state_names(out, 2))
    check_equal(out, trained_alone(tmp_path, tiny_checkpoint, out, train=alone, rollout=more))


def test_an_adapter_is_published_alone_and_weights_are_merged_when_they_are_read(
    forked: None, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    servers = {"sglang": {"workers": ["http://127.0.0.1:9"], "concurrency": 1, "weights_transport": "adapter"}}
    spec = spec_for(tmp_path, tiny_checkpoint, train=LORA, engine=servers)
    alone = make_trainer(prepare(spec_for(tmp_path, tiny_checkpoint, train={**LORA, "num_processes": 1})))
    assert alone.adapter is not None
    for parameter in alone.policy.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    alone.save(tmp_path / "state")

    async def main() -> None:
        transport = AdapterTransport(
            TransportContext(kind="sglang", folder=None, checkpoint=tiny_checkpoint, untied_head=False)
        )
        async with trainers.trainer_of(prepare(spec), tmp_path / "run") as trainer:
            await asyncio.to_thread(trainer.load, tmp_path / "state")
            weights = await asyncio.to_thread(trainer.weights)
            folder = (await transport.stage(TensorUpdate(weights, policy_version=1))).folder
            assert trainer._home is None  # nothing but the adapter has been written
            merged = await asyncio.to_thread(dict, weights)
            with pytest.raises(OSError, match="the adapter cannot be written"):
                await asyncio.to_thread(trainer.write_adapter, tmp_path / "ranks_loss.py", base=tiny_checkpoint)
        alone.adapter.write_adapter(tmp_path / "alone", base=tiny_checkpoint)
        assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
        ours, theirs = (each / "adapter_model.safetensors" for each in (folder, tmp_path / "alone"))
        assert ours.read_bytes() == theirs.read_bytes()
        transport.close()
        assert merged.keys() == alone.weights().keys()
        assert all(torch.equal(each, merged[name]) for name, each in alone.weights().items())

    asyncio.run(main())


def of_main(sample: object, prompt: object) -> float:
    return 1.0


of_main.__module__ = "__main__"


@pytest.mark.parametrize(
    ("section", "changed", "message"),
    [
        ("train", {"kind": TrainKind.REWARD_MODEL}, "reward models are trained by one process"),
        ("train", {"device": "cuda"}, "each process takes a GPU, from 0 on, and this process sees"),
        ("cluster", {"kind": ClusterKind.RAY}, "cluster.trainer = 'driver'"),
        (
            "engine",
            {"sglang": SGLangSettings(workers=("http://127.0.0.1:1",), weights_transport="nccl")},
            "servers read them from files",
        ),
        ("plugins", {"reward": lambda sample, prompt: 1.0}, "imports the functions of the settings, .*: put it into a"),
        ("plugins", {"reward": of_main}, "cannot import one .it is the main program's.: put it into a module"),
    ],
)
def test_what_several_processes_cannot_train_is_refused(
    section: str,
    changed: dict[str, Any],
    message: str,
    tmp_path: Path,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = spec_for(tmp_path, tiny_checkpoint, train={"num_processes": 64}).settings
    settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update=changed)})
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    with pytest.raises(ConfigError, match=message):
        check_training(settings)


def test_processes_and_servers_have_gpus_of_their_own(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def check(device: str, **launch: Any) -> None:
        settings = spec_for(tmp_path, tiny_checkpoint, train={"device": device}).settings
        engine = settings.engine.model_copy(update={"launch": LaunchSettings.model_validate(launch)})
        check_ranks(settings.model_copy(update={"engine": engine}))

    check("cuda:2", gpus=((0,), (1,)))
    check("cuda", gpus=((0,), (1,)), colocate=True)
    check("cuda:2", num_servers=2)
    with pytest.raises(ConfigError, match="GPU 1 is a server's as well: set "):
        check("cuda:1", num_servers=2)
    with pytest.raises(ConfigError, match="GPU 3 is a server's as well"):
        check("cuda:2", gpus=((0,), (3,)))


def test_moments_of_several_processes_are_not_kept_by_the_cpu(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.offload = true is for num_processes = 1"):
        spec_for(tmp_path, tiny_checkpoint, train={"optimizer": {"offload": True}})


@pytest.mark.parametrize(
    ("method", "args", "timeout", "message"),
    [
        ("wait", (), 0.1, r"^no answer from rank 1 of 2 in train.process_timeout_seconds = 0.1$"),
        # More than what lies between two processes.
        ("take", (b"0" * (1 << 23),), 2.0, r"^no answer from rank (0, )?1 of 2 in train.process_timeout_seconds = 2$"),
        # As NCCL ends a process that waits in vain.
        ("end", (), 60.0, r"rank 1 of 2 \(process \d+\) was killed by SIGABRT \(what\(\): .*\); no answer from rank 0"),
    ],
)
def test_a_process_that_does_not_answer_ends_all(
    method: str,
    args: tuple[Any, ...],
    timeout: float,
    message: str,
    fork_rollfeed: object,
    leaves_no_forks: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_group, "_GRACE_SECONDS", 1.0)
    (tmp_path / "part.py").write_text(PART)

    async def main() -> None:
        async with ForkedRanks(2, f"{tmp_path / 'part.py'}:Part", timeout_seconds=timeout) as group:
            log_of(group._folder, 1).write_text("what(): Watchdog caught a timeout\nframe #0: clone\n\n")
            if method == "take":
                os.kill(group._pids[1], signal.SIGSTOP)
            with pytest.raises(HostDiedError, match=message):
                await group.call(method, *args)
            with pytest.raises(HostDiedError, match=message):
                await group.call("take", None)

    asyncio.run(main())


REFRESHED = {"kl_coefficient": 0.1, "reference_refresh_interval": 3, "reference_mixup_alpha": 0.5}
LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("grpo", "dr_grpo", "dapo", "gspo", "reinforce_pp", "rloo", "cispo")},
    "masked": {"loss": {"correction": "mask", "correction_level": "sequence", "kl_coefficient": 0.1}},
    "rollout": {"loss": {"old_logprobs": "rollout", "dual_clip": 3.0}},
    "refreshed": {"loss": REFRESHED},
    # Not whitened or divided: where all rewards are equal, that makes the rounding of a small divergence large.
    "rewarded": {"loss": {**REFRESHED, "kl_coefficient": 0.0, "reward_kl_coefficient": 0.1}},
    "adapter": {**SLOW_LORA, "loss": {"kl_coefficient": 0.1}},
    "adapter_gspo": {**SLOW_LORA, "method": "gspo"},
    "adapter_refreshed": {**SLOW_LORA, "loss": {"kl_coefficient": 0.1, "reference_refresh_interval": 3}},
}


@pytest.mark.soak
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_one_process_over_twenty_partial_steps(
    name: str, tmp_path: Path, tiny_checkpoint: Path, leaves_no_process: None
) -> None:
    changed: dict[str, Any] = {
        "train": {"num_epochs": 2, "optimizer": {"learning_rate": 1e-4, "epsilon": 1e-4}, **LOSSES[name]},
        "rollout": {"mode": "partial", "over_sampling_batch_size": 5, "num_rollout": 20},
    }
    train(spec_for(tmp_path, tiny_checkpoint, **changed), tmp_path / "run")
    check_equal(tmp_path / "run", trained_alone(tmp_path, tiny_checkpoint, tmp_path / "run", **changed))


OPTIONS: dict[str, dict[str, Any]] = {
    "entropy": {"loss": {"entropy_coefficient": 0.05}},
    "loss_function": {"loss": {"function": "ranks_loss:loss"}},
    "frozen": {"freeze_params": ["embed_tokens", "layers.0"]},
    "schedule": {"optimizer": {"learning_rate": 1e-3, "epsilon": 1e-4, "schedule": "cosine", "warmup_updates": 3}},
    "checkpointing": {"activation_checkpointing": True, "activation_offload": True},
    "adapter": {**LORA, "activation_checkpointing": True, "loss": {"kl_coefficient": 0.1}},
}


@pytest.mark.soak
@pytest.mark.parametrize("name", OPTIONS)
def test_what_else_a_training_may_have_is_that_of_one_process(
    name: str, tmp_path: Path, tiny_checkpoint: Path, leaves_no_process: None
) -> None:
    train_settings = {"num_epochs": 2, "num_minibatches": 2, **OPTIONS[name]}
    changed = {"train": train_settings, "rollout": {"mode": "partial", "num_rollout": 6}}
    train(spec_for(tmp_path, tiny_checkpoint, **changed), tmp_path / "run")
    check_equal(tmp_path / "run", trained_alone(tmp_path, tiny_checkpoint, tmp_path / "run", **changed))


@pytest.mark.soak
def test_compiled_layers_are_those_of_one_process_that_compiles_nothing(
    tmp_path: Path, tiny_checkpoint: Path, leaves_no_process: None
) -> None:
    rollout = {"num_rollout": 2}
    train(spec_for(tmp_path, tiny_checkpoint, train={"compile": True}, rollout=rollout), tmp_path / "run")
    check_equal(tmp_path / "run", trained_alone(tmp_path, tiny_checkpoint, tmp_path / "run", rollout=rollout))


@pytest.mark.soak
@pytest.mark.parametrize("share_prompts", [True, False])
def test_replayed_experts_are_those_of_one_process(
    share_prompts: bool, tmp_path: Path, leaves_no_process: None
) -> None:
    made = TinyModelSettings(hidden_size=32, num_layers=3)
    checkpoint = make_tiny_checkpoint(made, seed=1, cache_directory=tmp_path / "models", has_experts=True)
    changed: dict[str, Any] = {
        "sampling": {"return_routed_experts": True},
        "train": {"routing_replay": True, "share_prompts": share_prompts, "micro_batch_tokens": 128},
        "engine": {"context_length": 128},
        "rollout": {"num_rollout": 6},
    }
    train(spec_for(tmp_path, checkpoint, **changed), tmp_path / "run")
    check_equal(tmp_path / "run", trained_alone(tmp_path, checkpoint, tmp_path / "run", **changed))


@pytest.mark.soak
def test_balanced_experts_are_those_of_one_process_where_micro_batches_are(
    tmp_path: Path, leaves_no_process: None
) -> None:
    """Each is one sequence here: the loss depends on what is computed together."""
    made = TinyModelSettings(hidden_size=32, num_layers=2)
    checkpoint = make_tiny_checkpoint(made, seed=1, cache_directory=tmp_path / "models", has_experts=True)
    rows = [{"text": f"{number:030d}", "answer": str(number)} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data_set = {"path": "rows.jsonl", "input_key": "text", "label_key": "answer", "apply_chat_template": False}
    changed: dict[str, Any] = {
        "prompts": {"environments": [], "datasets": [data_set], "rollout_max_prompt_len": 30},
        "train": {
            "loss": {"router_aux_loss_coefficient": 0.3},
            "share_prompts": False,
            "micro_batch_tokens": 40,
        },
        "engine": {"context_length": 128},
        "rollout": {"num_rollout": 6},
        "reward": {"rm_type": None},
    }
    train(spec_for(tmp_path, checkpoint, **changed), tmp_path / "run")
    check_equal(tmp_path / "run", trained_alone(tmp_path, checkpoint, tmp_path / "run", **changed))
    assert all(each["train/router_aux_loss"] > 0 for each in records_of(tmp_path / "run"))


@pytest.mark.soak
@pytest.mark.parametrize("trained", [{}, LORA], ids=["weights", "adapter"])
def test_a_warm_up_evaluations_and_exports_are_those_of_one_process(
    trained: dict[str, Any], tmp_path: Path, tiny_checkpoint: Path, leaves_no_process: None
) -> None:
    words = {
        "id": "core/reverse_text",
        "level": 1,
        "apply_chat_template": False,
        "parameters": {"style": "compact", "alphabet_size": 4},
    }
    changed: dict[str, Any] = {
        "prompts": {"environments": [words]},
        "eval": {"num_prompts": 8, "environments": [words]},
        "reward": {"override_environments": False},
        "plugins": {"reward": None},
        "train": {
            **trained,
            "warm_up": {"stop_accuracy": 0.1, "probe_prompts": 40, "probe_interval": 5, "batch_size": 16},
            "loss": {"kl_coefficient": 0.1},
            "eval_interval": 1,
            "export_interval": 1,
            "num_exports_kept": 2,
            "export_best": "accuracy",
        },
    }
    out = tmp_path / "run"
    train(spec_for(tmp_path, tiny_checkpoint, **changed), out)
    alone = trained_alone(tmp_path, tiny_checkpoint, out, **changed)
    check_equal(out, alone)
    assert sorted(path.name for path in (out / EXPORTS).iterdir()) == ["best", "step-000002", "step-000003"]
    for name, tensor in load_file(out / EXPORTS / "step-000003" / "model.safetensors").items():
        assert torch.equal(tensor, weights_of(out)[name])
    one = {**changed, "rollout": {"num_rollout": 1}, "train": {**changed["train"], "num_processes": 1}}
    train(spec_for(tmp_path, tiny_checkpoint, **one), tmp_path / "one")
    ours, theirs = (read_records(folder / WARM_UP_LOG) for folder in (out, tmp_path / "one"))
    assert [each["loss"] for each in ours[1:]] == pytest.approx([each["loss"] for each in theirs[1:]], abs=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("trained", [{}, LORA], ids=["weights", "adapter"])
def test_supervised_training_is_that_of_one_process(
    trained: dict[str, Any], tmp_path: Path, tiny_checkpoint: Path, leaves_no_process: None
) -> None:
    rows = [{"text": f"{number} and {number}: ", "answer": str(2 * number)} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed: dict[str, Any] = {
        "prompts": {
            "environments": [],
            "datasets": [
                {"path": "rows.jsonl", "input_key": "text", "label_key": "answer", "apply_chat_template": False}
            ],
        },
        "rollout": {"mode": "sft", "num_rollout": 20, "n_samples_per_prompt": 1},
        "train": trained,
        "reward": {},
        "plugins": {"reward": None},
    }
    train(spec_for(tmp_path, tiny_checkpoint, **changed), tmp_path / "run")
    check_equal(tmp_path / "run", trained_alone(tmp_path, tiny_checkpoint, tmp_path / "run", **changed))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"loss": REFRESHED}, ((2, 2), (3, 4), (1, 6), (3, 7))),
        (
            {**LORA, "export_interval": 7, "loss": {"kl_coefficient": 0.1, "reference_refresh_interval": 3}},
            ((1, 1), (2, 3), (3, 5), (1, 6), (3, 7)),
        ),
    ],
    ids=["weights", "adapter"],
)
def test_checkpoints_are_taken_on_by_any_number_of_processes(
    settings: dict[str, Any],
    counts: Sequence[tuple[int, int]],
    tmp_path: Path,
    tiny_checkpoint: Path,
    leaves_no_process: None,
) -> None:
    for count, num_rollout in counts:
        changed = {"rollout": {"num_rollout": num_rollout}, "train": {**settings, "num_processes": count}}
        train(spec_for(tmp_path, tiny_checkpoint, **changed), tmp_path / "run")
    check_equal(tmp_path / "run", trained_alone(tmp_path, tiny_checkpoint, tmp_path / "run", **changed))
    for exported in (tmp_path / "run" / EXPORTS).glob(f"*/{ADAPTER}/*"):
        assert exported.read_bytes() == (tmp_path / "run" / MODEL / ADAPTER / exported.name).read_bytes()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("rank", "fault", "timeout", "message", "trained"),
    [
        (1, "SIGKILL", 600, r"rank 1 of 2 \(process \d+\) was killed by SIGKILL, .* goes on at step 1", {}),
        (
            1,
            "SIGKILL",
            600,
            r"rank 1 of 2 \(process \d+\) was killed by SIGKILL, .* goes on at step 1",
            {**LORA, "loss": {"kl_coefficient": 0.1}},
        ),
        (0, "SIGKILL", 600, r"rank 0 of 2 \(process \d+\) was killed by SIGKILL", {}),
        (
            1,
            "OutOfMemoryError",
            600,
            r"rank 1 of 2: step 1: the GPU's memory is not enough .*; no answer from rank 0",
            {},
        ),
        (
            1,
            "MemoryError",
            600,
            r"rank 1 of 2: step 1: .* MemoryError: .*, lower train.micro_batch_tokens; no answer",
            {},
        ),
        (1, "SIGSTOP", 20, r"no answer from rank 1 of 2 in train.process_timeout_seconds = 20; the same", {}),
    ],
)
def test_what_stops_one_process_ends_the_run_with_its_cause(
    rank: int,
    fault: str,
    timeout: float,
    message: str,
    trained: dict[str, Any],
    tmp_path: Path,
    tiny_checkpoint: Path,
    leaves_no_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "faulty_ranks.py").write_text(FAULTS)
    monkeypatch.setattr(trainers, "_RANK_FACTORY", f"{tmp_path / 'faulty_ranks.py'}:FaultyRank")
    spec = spec_for(tmp_path, tiny_checkpoint, train={"process_timeout_seconds": timeout, **trained})
    out = tmp_path / "run"
    monkeypatch.setenv(f"TEST_FAULT_OF_RANK_{rank}", fault)
    with pytest.raises(HostDiedError, match=message) as caught:
        train(spec, out)
    assert str(caught.value).count("step 1: ") <= 1
    kept = {path.name for path in (out / CHECKPOINTS).iterdir()}
    assert kept == {"step-000000"}
    monkeypatch.delenv(f"TEST_FAULT_OF_RANK_{rank}")
    train(spec, out)
    check_equal(out, trained_alone(tmp_path, tiny_checkpoint, out, train=trained))


@pytest.mark.soak
def test_processes_that_have_other_settings_end_the_run(
    tmp_path: Path, tiny_checkpoint: Path, leaves_no_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_ranks.py").write_text(FAULTS)
    monkeypatch.setattr(trainers, "_RANK_FACTORY", f"{tmp_path / 'faulty_ranks.py'}:FaultyRank")
    monkeypatch.setenv("TEST_FAULT_OF_RANK_1", "settings")
    with pytest.raises(
        RunFailedError,
        match=r"^train.num_processes = 2: the processes do not agree on the settings: \w+ in rank 0 and ",
    ):
        train(spec_for(tmp_path, tiny_checkpoint), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize(("kernels", "served"), [("torch", "fp32"), ("native", "int8")])
def test_the_base_of_an_adapter_is_held_in_bf16_and_engines_have_what_is_trained(
    kernels: str,
    served: str,
    tmp_path: Path,
    tiny_checkpoint: Path,
    leaves_no_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored, out = tmp_path / "stored", tmp_path / "run"
    shutil.copytree(tiny_checkpoint, stored)
    base = {name: each.bfloat16() for name, each in load_file(stored / "model.safetensors").items()}
    save_file(base, stored / "model.safetensors", {"format": "pt"})
    (tmp_path / "typed_ranks.py").write_text(TYPES)
    monkeypatch.setattr(trainers, "_RANK_FACTORY", f"{tmp_path / 'typed_ranks.py'}:TypedRank")
    monkeypatch.setenv("TEST_TYPES_OF_RANKS", str(tmp_path))
    changed: dict[str, Any] = {
        # The reference is a model of its own.
        "train": {**LORA, "precision": "bf16", "loss": {"kl_coefficient": 0.1, "reference_checkpoint": str(stored)}},
        "engine": {"kernels": kernels, "precision": served},
        "rollout": {"num_rollout": 4},
    }
    train(spec_for(tmp_path, stored, **changed), out)
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "torch.bfloat16: True, torch.float32: False"
    found = weights_of(out)
    for name, tensor in base.items():
        halves = [f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight" for half in "BA"]
        if halves[0] in found:
            assert found[halves[0]].any()
            tensor = (tensor.float() + found[halves[0]] @ found[halves[1]] * 2.0).bfloat16()
        assert torch.equal(found[name], tensor)
    proofs = [each["weights/proof_slope"] for each in read_records(out / METRICS) if "weights/proof_slope" in each]
    assert proofs
    assert proofs == pytest.approx([1.0] * len(proofs), abs=0.2)


@pytest.mark.soak
def test_a_killed_run_leaves_no_process(
    start_rollfeed: Callable[..., Any], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    (tmp_path / "run.toml").write_text(
        f'''
[model]
checkpoint = "{tiny_checkpoint}"
[[prompts.environments]]
id = "core/copy_text"
apply_chat_template = false
[rollout]
num_rollout = 100000
rollout_batch_size = 2
[sampling]
rollout_max_response_len = 4
[engine]
context_length = 256
[train]
device = "cpu"
num_processes = 2
'''
    )
    out = tmp_path / "run"
    command = start_rollfeed("train", tmp_path / "run.toml", "--out", out)
    wait_for(lambda: (out / TRAIN_LOG).exists() and len(records_of(out)) > 1)
    ranks = ranks_of(command.pid)
    assert len(ranks) == 2
    command.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in ranks))


def ranks_of(pid: int) -> list[int]:
    """Return the ranks whose parent a process was to be."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"rollfeed.cluster.rank_process" in words and str(pid).encode() in words:
                found.append(int(path.parent.name))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
