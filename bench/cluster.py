"""A run on a real Ray cluster of several local nodes beside the same run without one, and broken by kills.

    make ray && .venv-ray/bin/python bench/cluster.py --repetitions 7 --kills 5 --output bench/cluster.json

That is half an hour; with ``--kills 0`` it is seven minutes, and wants a machine with nothing else to do.
The engines are fake servers with a model of time. What is measured: the time of equal steps with and without a cluster,
in turns on the same servers, and how long a run takes until its first step begins. What is killed, with SIGKILL: a
rollout worker, a raylet with all of its node, the driver. Then the files are counted as ``rollfeed bench chaos`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rollfeed.benchmarks.chaos.job import SETTINGS, ChaosJob, make_job
from rollfeed.benchmarks.chaos.processes import ChaosEngine, RunProcess, final_ledger
from rollfeed.benchmarks.chaos.recount import recount
from rollfeed.benchmarks.machine import machine

WAIT_SECONDS = 120.0
TIME_MODEL = ("--num-slots", "64", "--step-ms", "8", "--median-length", "120", "--max-length", "300")
"""Of the servers of timed runs: responses take as long as such of a model of some billions of parameters."""
TIMED = (
    "rollout.num_rollout=8",
    "rollout.rollout_batch_size=8",
    "rollout.n_samples_per_prompt=8",
    "rollout.over_sampling_batch_size=12",
    "engine.sglang.concurrency=128",
)
"""Steps of some seconds, each of which submits 96 responses; the servers have room for all of them."""
NUM_NODES = 3
KINDS = ("actor", "raylet", "driver")
MODES = ("sync", "partial", "async")
MARK = f"ROLLFEED_CLUSTER_BENCH={os.getpid()}"
"""In the environment of all that is started here."""
LEFT = ("left_behind", "processes_left")
"""Of a run that has ended: actors and placement groups; processes of its cluster."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each kind, in turns; 0: kills only")
    parser.add_argument("--kills", type=int, default=1, help="of each kind in each mode; 0: time only")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="that are broken; timed is sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="results of other parts that it has are kept")
    given = parser.parse_args()
    os.environ |= dict([MARK.split("=")]) | {"RAY_USAGE_STATS_ENABLED": "0"}
    parts: dict[str, Any] = {"timed": {"sync": timed}} if given.repetitions else {}
    parts |= {"killed": dict.fromkeys(given.modes, broken)} if given.kills else {}
    made: dict[str, Any] = {}
    for part, measures in parts.items():
        for mode, measure in measures.items():
            made.setdefault(part, {})[mode] = told = measured(measure, mode, given)
            print(f"{part} {mode}: {json.dumps(told)}", file=sys.stderr)
    print(json.dumps(made, indent=2))
    if given.output is not None:
        before = json.loads(given.output.read_text()) if given.output.exists() else {}
        both = {part: before.get(part, {}) | made.get(part, {}) for part in ("timed", "killed")}
        given.output.write_text(json.dumps(both, indent=2) + "\n")
    all_told = [told for each in made.values() for told in each.values()]
    return int(any(told.get(name) for told in all_told for name in ("lost", "doubled", "problems", *LEFT)))


def measured(measure: Callable[..., dict[str, Any]], mode: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure on a cluster and servers of its own, and look at what is left of them."""
    result: dict[str, Any] = {"seed": given.seed, "nodes": NUM_NODES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollfeed-cluster-")))
        servers = [ChaosEngine(TIME_MODEL) if measure is timed else ChaosEngine() for _ in range(2)]
        for server in servers:
            stack.enter_context(server).wait_until_ready()
        cluster = stack.enter_context(started_cluster())
        job = make_job(
            folder,
            num_kills=2 * len(KINDS) * given.kills,
            mode=mode,
            deterministic=mode == "sync",
            seed=given.seed,
            addresses=[server.address for server in servers],
        )
        result |= measure(cluster, job, given)
        result[LEFT[0]] = left_behind(cluster)
    result[LEFT[1]] = wait_until_none(ray_processes)
    return result | {"command": " ".join(["python", *sys.argv]), "machine": machine()}


class Nodes:
    """A cluster of local nodes, whose raylets can be killed."""

    def __init__(self, cluster: Any) -> None:
        self.address: str = cluster.address
        self.cluster = cluster
        self.workers = [cluster.add_node(num_cpus=2) for _ in range(NUM_NODES - 1)]

    def raylet_pids(self) -> list[int]:
        return [node.all_processes["raylet"][0].process.pid for node in (self.cluster.head_node, *self.workers)]

    def kill_raylet(self) -> None:
        """Kill a node with rollout workers on it, and add another one."""
        parents = {parent for _, parent in rollout_workers(self)}
        chosen = next(
            (node for node in self.workers if node.all_processes["raylet"][0].process.pid in parents), self.workers[0]
        )
        self.workers.remove(chosen)
        self.cluster.remove_node(chosen, allow_graceful=False)
        self.workers.append(self.cluster.add_node(num_cpus=2))


@contextmanager
def started_cluster() -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield Nodes(cluster)
    finally:
        cluster.shutdown()


def timed(cluster: Nodes, job: ChaosJob, given: argparse.Namespace) -> dict[str, Any]:
    """Make the run with and without a cluster, in turns; the first step is the warm-up."""
    repetitions = given.repetitions
    seconds: dict[str, list[float]] = {"local": [], "cluster": []}
    starts: dict[str, list[float]] = {"local": [], "cluster": []}
    for repetition in range(repetitions):
        for kind in ("local", "cluster") if repetition % 2 == 0 else ("cluster", "local"):
            process = run_of(cluster if kind == "cluster" else None, job, f"{kind}-{repetition}", *TIMED)
            begun = time.time()
            process.start()
            code = process.wait_for_end()
            if code:
                raise SystemExit(f"{kind} failed: {process.last_words()}")
            steps = [json.loads(line) for line in (process.out / "metrics.jsonl").read_text().splitlines()]
            first = steps[0]
            starts[kind].append(first["time/unix_seconds"] - first["perf/step_seconds"] - begun)
            seconds[kind].append(sum(step["perf/step_seconds"] for step in steps[1:]) / (len(steps) - 1))
            print(f"{kind}: start {starts[kind][-1]:.1f} s, {seconds[kind][-1]:.3f} s a step", file=sys.stderr)
    ratios = [ours / theirs - 1.0 for ours, theirs in zip(seconds["cluster"], seconds["local"], strict=True)]
    same = [
        [path.read_bytes() for path in sorted((job.folder / f"{kind}-0" / "batches").iterdir())] for kind in seconds
    ]
    return {
        "timed_settings": TIMED,
        "time_model": TIME_MODEL,
        "step_seconds": seconds,
        "overhead": statistics.median(ratios),
        "overheads": ratios,
        "start_seconds": starts,
        "equal_batches": same[0] == same[1],
    }


def broken(cluster: Nodes, job: ChaosJob, given: argparse.Namespace) -> dict[str, Any]:
    """Kill each kind so many times, in turn, and count what the run has come to."""
    process = run_of(cluster, job, "broken")
    process.start()
    recovery: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        for number in range(given.kills * len(KINDS)):
            kind, step = KINDS[number % len(KINDS)], process.num_steps() + 2
            if not process.wait_until(process.batch_file(step).exists):
                break
            if kind == "actor":
                if not (pids := [pid for pid, _ in rollout_workers(cluster)]):
                    continue
                os.kill(pids[number % len(pids)], signal.SIGKILL)
            elif kind == "raylet":
                cluster.kill_raylet()
            else:
                process.kill()
                process.start()
            killed, done = time.monotonic(), process.num_steps()
            process.wait_until(lambda wanted=done + 3: process.num_steps() >= wanted)
            recovery[kind].append(time.monotonic() - killed)
            print(f"{kind} killed at step {step}: 3 steps in {recovery[kind][-1]:.1f} s", file=sys.stderr)
        code = process.wait_for_end()
    finally:
        process.kill()
    counts = recount(process.out, job, ledger=final_ledger(process.out))
    steps = [json.loads(line) for line in (process.out / "metrics.jsonl").read_text().splitlines()]
    return {
        "kills": {kind: len(each) for kind, each in recovery.items()},
        "lost": len(counts.lost),
        "doubled": len(counts.duplicated),
        "problems": [*counts.problems[:20], *([process.last_words()] if code else [])],
        "three_steps_after_a_kill_seconds": recovery,
        "groups_run_again": sum(
            max(0.0, after.get("engine/groups_run_again", 0.0) - before.get("engine/groups_run_again", 0.0))
            for before, after in zip([{}, *steps], steps, strict=False)
        ),
        "steps": counts.num_steps,
    }


def run_of(cluster: Nodes | None, job: ChaosJob, name: str, *overrides: str) -> RunProcess:
    ray = [] if cluster is None else ["cluster.kind=ray", f"cluster.address={cluster.address}"]
    return RunProcess(job.folder / SETTINGS, job.folder / name, overrides=[*ray, *overrides])


def processes() -> Iterator[tuple[int, str]]:
    """Number and command line of every process."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield int(path.parent.name), path.read_text(errors="replace").replace("\0", " ").strip()


def ray_processes() -> list[str]:
    """Command lines of Ray's processes that have the environment of this one."""
    found = []
    for pid, text in processes():
        with suppress(OSError):
            if "ray" in text and MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(text)
    return found


def rollout_workers(cluster: Nodes) -> list[tuple[int, int]]:
    """Number of each rollout worker of the cluster, and of its raylet."""
    raylets, found = set(cluster.raylet_pids()), []
    for pid, text in processes():
        with suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if text.startswith("ray::Hosted") and parent in raylets:
                found.append((pid, parent))
    return sorted(found)


def left_behind(cluster: Nodes) -> list[str]:
    """Say what of a run is there that has ended: actors and placement groups."""
    return wait_until_none(lambda: [f"actor {pid}" for pid, _ in rollout_workers(cluster)]) + groups_left(cluster)


def groups_left(cluster: Nodes) -> list[str]:
    import ray
    from ray.util.placement_group import placement_group_table

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        states = {number: each["state"] for number, each in placement_group_table().items()}
        return [f"placement group {number}: {state}" for number, state in states.items() if state != "REMOVED"]
    finally:
        ray.shutdown()


def wait_until_none(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    sys.exit(main())
