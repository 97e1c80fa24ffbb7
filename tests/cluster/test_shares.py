"""The settings of one worker among several, and settings that a cluster cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from rollfeed.app.cluster import cluster_engine, settings_here
from rollfeed.app.cluster.shares import gpus_per_worker, worker_spec
from rollfeed.config import RunSpec, Settings, validate_settings
from rollfeed.engine.idle import IdleEngine
from rollfeed.errors import ConfigError

SERVERS = [f"http://10.0.0.{number}:30000" for number in range(1, 6)]


def tree(**engine: Any) -> dict[str, Any]:
    return {
        "prompts": {"environments": [{"id": "core/copy_text"}]},
        "rollout": {"max_requests_in_flight": 9},
        "engine": engine,
        "cluster": {"kind": "ray"},
    }


def shares(settings: Settings, num_workers: int) -> list[Settings]:
    return [worker_spec(RunSpec(settings), number, num_workers).settings for number in range(num_workers)]


def test_each_server_is_one_workers_and_bounds_are_divided() -> None:
    settings = Settings.model_validate(tree(sglang={"workers": SERVERS, "concurrency": 100}))
    parts = [share.engine.sglang for share in shares(settings, 2)]
    assert all(part is not None for part in parts)
    assert sorted(each for part in parts if part for each in part.workers) == SERVERS
    assert [part.concurrency for part in parts if part] == [50, 50]
    assert [share.rollout.max_requests_in_flight for share in shares(settings, 2)] == [5, 5]
    assert settings.num_servers == 5


def test_launched_servers_are_shared_with_ports_of_their_own_and_gpus_from_ray() -> None:
    launch = {"num_servers": 5, "gpus_per_server": 2, "port": 31000}
    settings = Settings.model_validate(tree(sglang={}, launch=launch))
    parts = [share.engine.launch for share in shares(settings, 2)]
    assert [(part.num_servers, part.port) for part in parts if part] == [(3, 31000), (2, 31003)]
    assert gpus_per_worker(settings) == 2.0
    settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"num_workers": 2})})
    assert gpus_per_worker(settings) == 6.0


def test_servers_that_workers_launch_need_no_program_and_no_gpu_here() -> None:
    launch = {"num_servers": 5, "gpus_per_server": 2, "command": ["/only/on/nodes/vllm"]}
    settings = settings_here(Settings.model_validate(tree(sglang={}, launch=launch)))
    assert settings.engine.launch is None
    assert settings.num_servers == 5
    settings = settings_here(Settings.model_validate(tree(device="cuda", precision="bf16")))
    assert (settings.engine.device, settings.engine.precision) == ("cpu", "auto")
    here = Settings.model_validate({**tree(sglang={}, launch=launch), "cluster": {"kind": "local"}})
    assert settings_here(here) is here


def test_a_launched_server_has_one_gpu_where_nodes_have_some_and_nothing_else_is_said() -> None:
    settings = Settings.model_validate(tree(sglang={}, launch={"num_servers": 5}))
    assert gpus_per_worker(settings) is None


def test_an_embedded_engine_has_a_gpu_where_it_computes_on_one() -> None:
    assert gpus_per_worker(Settings.model_validate(tree(device="cuda"))) == 1.0
    assert gpus_per_worker(Settings.model_validate(tree())) == 0.0


def test_without_a_cluster_the_engine_is_the_runs_own() -> None:
    settings = Settings.model_validate({**tree(), "cluster": {"kind": "local", "num_workers": 3}})
    engine = IdleEngine(context_length=10, vocab_size=10)
    assert cluster_engine(RunSpec(settings), engine) is engine


@pytest.mark.parametrize(
    ("engine", "cluster", "said"),
    [
        ({"sglang": {"router": "http://10.0.0.1:30000"}}, {}, "engine.sglang.router"),
        ({"sglang": {}, "launch": {"gpus": [[0]]}}, {}, "engine.launch.gpus"),
        ({"sglang": {}, "launch": {"colocate": True}}, {}, "engine.launch.colocate"),
        ({"sglang": {"workers": SERVERS[:2]}}, {"num_workers": 3}, "cluster.num_workers = 3: there are 2 servers"),
        ({}, {"address": "head node"}, "is no address"),
        ({}, {"kind": "slurm"}, "cluster.kind"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused(engine: dict[str, Any], cluster: dict[str, Any], said: str) -> None:
    values = tree(**engine)
    values["cluster"] |= cluster
    with pytest.raises(ConfigError, match=said):
        validate_settings(values, where="settings.toml")
