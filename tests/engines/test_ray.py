"""Real Ray, several local nodes: a run's batches, kills of each of its processes, and clusters that cannot be used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.servers import ROOT, python_of

from rollfeed.benchmarks.machine import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SETTINGS = """
seed = 5

[model]
checkpoint = "tiny"

[[prompts.environments]]
id = "core/copy_text"
apply_chat_template = false

[rollout]
num_rollout = 3
rollout_batch_size = 4
n_samples_per_prompt = 4
deterministic = true

[sampling]
rollout_max_response_len = 24

[engine]
context_length = 512
"""
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=2, num_gpus=1)
cluster.add_node(num_cpus=2, num_gpus=1, env_vars={"PYTHONPATH": sys.argv[1]} if sys.argv[1:] else None)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
REWARD_WORKER = """
import asyncio, os, signal, sys
from rollfeed.cluster import wanted_of_nodes
from rollfeed.cluster.ray_hosting import RayHosting, Resources
from rollfeed.cluster.remote_workers import RemoteWorkers
from rollfeed.config import ClusterKind, ClusterSettings, RewardSettings

async def main():
    settings = ClusterSettings(kind=ClusterKind.RAY, address=sys.argv[1])
    async with RayHosting(settings, needs=wanted_of_nodes(), per_worker=Resources(1.0, 0.0)) as hosting:
        made = "rollfeed.app.inside_cluster.reward_worker:RewardWorker"
        host = await hosting.start(made, RewardSettings(), place=None)
        workers = RemoteWorkers([host])
        parent = await workers.call("os:getppid", [], deadline_seconds=60.0)
        while "ray::" not in open(f"/proc/{parent}/cmdline").read():
            parent = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        print(await workers.call("operator:add", [2, 3], deadline_seconds=60.0))

asyncio.run(main())
"""
RUN_SECONDS = 300.0
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("ray")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Ray writes a token into the home folder, unless it is told not to."""
    return {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def run(python: Path, environment: dict[str, str], tmp_path: Path) -> Run:
    """Run a command to its end, in a folder with settings."""
    (tmp_path / "settings.toml").write_text(SETTINGS)

    def run(
        name: str, out: str, *overrides: str, file: str = "settings.toml", address: str = ""
    ) -> subprocess.CompletedProcess[str]:
        words = [word for each in overrides for word in ("--set", each)]
        return subprocess.run(
            [python, "-m", "rollfeed", name, file, "--out", out, "--quiet", *words],
            cwd=tmp_path,
            env={**environment, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )

    return run


def start_cluster(python: Path, environment: dict[str, str], *arguments: str) -> tuple[subprocess.Popen[str], str]:
    cluster = subprocess.Popen(
        [python, "-c", CLUSTER, *arguments], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cluster.stdout is not None
    return cluster, next(line for line in cluster.stdout if ":" in line).strip()


@pytest.fixture
def address(python: Path, environment: dict[str, str]) -> Iterator[str]:
    cluster, address = start_cluster(python, environment)
    yield address
    cluster.communicate()


def batches(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run / "batches").iterdir())]


def metrics(run: Path) -> dict[str, float]:
    last: dict[str, float] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return last


def of_this_test(environment: dict[str, str]) -> list[tuple[int, str]]:
    """Numbers and commands of processes that have the environment of this test's."""
    found, mark = [], f"HOME={environment['HOME']}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes():
                found.append((int(path.name), (path / "cmdline").read_text(errors="replace")))
        except OSError:
            continue
    return found


def below_ray(environment: dict[str, str]) -> list[str]:
    return [text for _, text in of_this_test(environment) if "ray" in text]


def wait_until_none(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + 60.0
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_batches_on_a_cluster_are_those_of_a_local_run_and_graders_may_be_elsewhere(
    run: Run, address: str, tmp_path: Path
) -> None:
    assert run("run", "local").returncode == 0
    ended = run("run", "there", "cluster.kind=ray", f"cluster.address={address}", "cluster.reward_workers=1")
    assert ended.returncode == 0, ended.stderr
    assert batches(tmp_path / "there") == batches(tmp_path / "local")
    assert metrics(tmp_path / "there")["engine/rollout_workers"] == 3


def test_a_cluster_of_the_runs_own_ends_with_it_also_when_it_is_killed(
    run: Run, python: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    ended = run("run", "own", "cluster.kind=ray", "cluster.address=local", "cluster.num_workers=2")
    assert ended.returncode == 0, ended.stderr
    assert wait_until_none(lambda: below_ray(environment)) == []
    words = ["run", "settings.toml", "--out", "killed", "--set", "cluster.kind=ray", "--set", "cluster.address=local"]
    words += ["--set", "rollout.num_rollout=100000"]
    for number in (signal.SIGKILL, signal.SIGINT):
        with (tmp_path / "log").open("w") as log:
            driver = subprocess.Popen(
                [python, "-m", "rollfeed", *words], cwd=tmp_path, env=environment, stdout=log, stderr=log
            )
        before = len(list((tmp_path / "killed").glob("batches/*")))
        while driver.poll() is None and len(list((tmp_path / "killed").glob("batches/*"))) <= before:
            time.sleep(0.1)
        driver.send_signal(number)
        driver.wait(60)
        assert wait_until_none(lambda: below_ray(environment)) == []
    assert driver.returncode == 130, (tmp_path / "log").read_text()


def test_the_only_reward_worker_that_is_killed_is_started_again(
    python: Path, environment: dict[str, str], address: str
) -> None:
    words = [python, "-c", REWARD_WORKER, address]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert ended.stdout.splitlines()[-1] == "5", ended.stderr  # Ray tells of the killed process before


REWARD = """
def score(sample, prompt):
    print("scored")
    return float(sample.response_token_ids.sum() % 7)
"""
TRAINED = """
[train]
checkpoint_interval = 2

[reward]
override_environments = true

[plugins]
reward = "reward_on_ray:score"
"""


def trained_files(run: Path) -> dict[str, bytes]:
    found = [path for name in ("batches", "checkpoints", "model") for path in (run / name).rglob("*.*")]
    return {str(path.relative_to(run)): path.read_bytes() for path in found if path.is_file()}


@pytest.fixture
def training(tmp_path: Path) -> str:
    (tmp_path / "reward_on_ray.py").write_text(REWARD)
    (tmp_path / "train.toml").write_text(SETTINGS + TRAINED)
    return "train.toml"


def test_a_trainer_on_the_cluster_leaves_the_files_of_a_local_one(
    run: Run, address: str, training: str, tmp_path: Path
) -> None:
    assert run("train", "local", file=training).returncode == 0
    there = ("cluster.kind=ray", f"cluster.address={address}", "cluster.reward_workers=1")
    ended = run("train", "there", *there, file=training)
    assert ended.returncode == 0, ended.stderr
    assert set((tmp_path / "there" / "rewards.log").read_text().splitlines()) == {"scored"}
    assert trained_files(tmp_path / "there") == trained_files(tmp_path / "local")
    assert metrics(tmp_path / "there")["weights/proof_residual"] < 1e-3
    ended = run("train", "here", "cluster.kind=ray", "cluster.address=local", "cluster.trainer=driver", file=training)
    assert ended.returncode == 0, ended.stderr
    assert trained_files(tmp_path / "here") == trained_files(tmp_path / "local")


def test_a_training_whose_actors_are_killed_ends_with_one_line_and_goes_on(
    run: Run, python: Path, environment: dict[str, str], address: str, training: str, tmp_path: Path
) -> None:
    there = ("cluster.kind=ray", f"cluster.address={address}")
    words = [word for each in (*there, "rollout.num_rollout=100000") for word in ("--set", each)]
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [python, "-m", "rollfeed", "train", training, "--out", "there", "--quiet", *words],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
        )
    checkpoints = tmp_path / "there" / "checkpoints"
    while driver.poll() is None and not list(checkpoints.glob("step-*")):
        time.sleep(0.05)
    for number in hosted_actors(environment):
        os.kill(number, signal.SIGKILL)
    assert driver.wait(RUN_SECONDS) == 1
    [said] = [line for line in (tmp_path / "log").read_text().splitlines() if "the trainer is lost: trainer: " in line]
    step = int(sorted(checkpoints.glob("step-*"))[-1].name.removeprefix("step-"))
    assert f"; the same command goes on at step {step + 1} from " in said
    more = f"rollout.num_rollout={step + 4}"
    ended = run("train", "there", *there, more, file=training)
    assert ended.returncode == 0, ended.stderr
    assert run("train", "local", more, file=training).returncode == 0
    assert trained_files(tmp_path / "there") == trained_files(tmp_path / "local")


def hosted_actors(environment: dict[str, str]) -> list[int]:
    """Processes of this test's actors: rollout workers, and the trainer."""
    return [number for number, text in of_this_test(environment) if text.startswith("ray::Hosted")]


def test_a_node_with_another_rollfeed_is_named_and_gets_no_work(
    run: Run, python: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "rollfeed"
    (other / "cluster").mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "0.0.1"\n')
    (other / "cluster" / "__init__.py").write_text("")
    (other / "cluster" / "node_checks.py").write_text("PROTOCOL = 1\n")
    cluster, address = start_cluster(python, environment, str(other.parent))
    try:
        ended = run("run", "there", "cluster.kind=ray", f"cluster.address={address}")
        assert ended.returncode == 0, ended.stderr
        assert "has rollfeed 0.0.1" in ended.stderr
        assert metrics(tmp_path / "there")["engine/rollout_workers"] == 2
    finally:
        cluster.communicate()


def test_a_node_that_hangs_at_the_start_is_named_and_others_do_the_work(
    run: Run, address: str, environment: dict[str, str], tmp_path: Path
) -> None:
    hanging = max(number for number, text in of_this_test(environment) if "/raylet/raylet" in text)
    os.kill(hanging, signal.SIGSTOP)
    try:
        ended = run("run", "there", "cluster.kind=ray", f"cluster.address={address}", "cluster.num_workers=2")
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert ended.returncode == 0, ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "it gets no work" in line]) == 1, ended.stderr
    assert metrics(tmp_path / "there")["engine/rollout_workers"] == 2


def test_clusters_that_do_not_answer_or_have_no_room_end_the_run_with_one_line(
    run: Run, address: str, training: str, tmp_path: Path
) -> None:
    ended = run("run", "a", "cluster.kind=ray", "cluster.address=127.0.0.1:1")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "no cluster answers there" in ended.stderr
    ended = run("run", "c", "cluster.kind=ray", address="http://127.0.0.1:8265/")
    assert ended.returncode == 2
    assert "the variable RAY_ADDRESS" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    large = ("cluster.cpus_per_worker=64", "cluster.startup_timeout_seconds=5")
    ended = run("run", "b", "cluster.kind=ray", f"cluster.address={address}", *large)
    assert ended.returncode == 1
    assert "there is no room for" in ended.stderr
    few = ("cluster.kind=ray", f"cluster.address={address}", "cluster.startup_timeout_seconds=5")
    ended = run("train", "d", *few, "cluster.trainer_cpus=64", file=training)
    assert ended.returncode == 1
    assert "there is no room for 1 trainer of {'CPU': 64.0, 'GPU': 1.0}" in ended.stderr
    assert not (tmp_path / "d").exists()


def test_kills_of_a_worker_of_a_node_and_of_the_driver_lose_and_double_nothing(
    python: Path, environment: dict[str, str]
) -> None:
    script = ROOT / "bench" / "cluster.py"
    ran = subprocess.run(
        [python, script, "--repetitions", "0", "--kills", "1"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    told = json.loads(ran.stdout)
    for mode in ("sync", "partial", "async"):
        made = told["killed"][mode]
        assert (made["lost"], made["doubled"], made["problems"]) == (0, 0, []), mode
        assert (made["left_behind"], made["processes_left"]) == ([], []), mode
        assert made["kills"] == {"actor": 1, "raylet": 1, "driver": 1}
    assert told["killed"]["sync"]["groups_run_again"] >= 1


SERVER = """
import os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(__file__ + ".gpus", "a") as file:
    print(os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
words = ["serve", "engine", "--model", given["--model-path"], "--port", given["--port"], "--context-length", "512"]
os.execv(sys.executable, [sys.executable, "-m", "rollfeed", *words])
"""


def test_workers_launch_a_server_each_on_the_gpu_that_ray_gives_them(
    run: Run, python: Path, environment: dict[str, str], address: str, tmp_path: Path
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    launch = "engine.launch={command=['/no/such/program'], num_servers=2, gpus_per_server=1}"
    (tmp_path / "launch.toml").write_text(SETTINGS + "[engine.sglang]\n")
    there = ("cluster.kind=ray", f"cluster.address={address}")
    ended = run("run", "there", *there, launch, file="launch.toml")
    assert ended.returncode == 2  # the driver does not look for what is on the nodes: they do
    assert "engine.launch.command: there is no program '/no/such/program'" in ended.stderr
    ended = run(
        "run", "there", *there, launch.replace("'/no/such/program'", f"'{python}', '{script}'"), file="launch.toml"
    )
    assert ended.returncode == 0, ended.stderr
    assert Path(f"{script}.gpus").read_text().split() == ["0", "0"]  # each is the first one of its node
    assert metrics(tmp_path / "there")["engine/live_workers"] == 2
    assert wait_until_none(lambda: [each for each in below_ray(environment) if "serve\0engine" in each]) == []


@pytest.fixture
def head(python: Path, environment: dict[str, str]) -> Iterator[dict[str, int]]:
    """The ports of a head node with Ray's client server and dashboard."""
    ports = {
        name: free_port()
        for name in ("port", "ray-client-server-port", "dashboard-port", "dashboard-agent-listen-port")
    }
    words = [f"--{name}={port}" for name, port in ports.items()] + ["--min-worker-port=0", "--max-worker-port=0"]
    # Without it Ray's client server forks in the middle of gRPC's calls, and hangs now and then.
    variables = {**environment, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    started = subprocess.Popen(
        [python.parent / "ray", "start", "--head", "--block", "--num-cpus=3", "--disable-usage-stats", *words],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    next(line for line in started.stdout if "block forever" in line)
    yield ports
    started.terminate()
    started.communicate()
    assert wait_until_none(lambda: below_ray(environment)) == []


def test_a_run_through_rays_client_server_and_one_as_its_job_have_the_batches_of_a_local_one(
    run: Run, python: Path, environment: dict[str, str], head: dict[str, int], tmp_path: Path
) -> None:
    assert run("run", "local").returncode == 0
    ended = run(
        "run", "client", "cluster.kind=ray", f"cluster.address=ray://127.0.0.1:{head['ray-client-server-port']}"
    )
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stderr.splitlines()) <= 2, ended.stderr  # no stacks of Ray's
    assert batches(tmp_path / "client") == batches(tmp_path / "local")
    submit = [python.parent / "ray", "job", "submit", "--address", f"http://127.0.0.1:{head['dashboard-port']}", "--"]
    files = [tmp_path / "settings.toml", "--out", tmp_path / "job"]
    ended = subprocess.run(
        [*submit, python, "-m", "rollfeed", "run", *files, "--set", "cluster.kind=ray"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert batches(tmp_path / "job") == batches(tmp_path / "local")
