"""A run whose groups are answered elsewhere: the same batches, and nothing lost when what answers them dies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.process_hosting import ProcessHosting
from tests.rewards.judging.conftest import judge_server

from rollfeed import app
from rollfeed.app.build import PreparedRun, prepare
from rollfeed.app.cluster import ClusterEngine, cluster_engine
from rollfeed.app.cluster.orders import AbortRequests, LineLogged, OutputWritten, read_events
from rollfeed.app.cluster.worker_places import RolloutWorkers, WorkerPlace
from rollfeed.app.inside_cluster.kept_output import KeptOutput
from rollfeed.app.inside_cluster.reward_worker import RewardWorker
from rollfeed.app.inside_cluster.rollout_worker import RolloutWorker
from rollfeed.cluster import Host, HostDiedError, wanted_of_nodes
from rollfeed.config import RewardSettings, RunSpec, Settings
from rollfeed.engine.idle import IdleEngine
from rollfeed.errors import ConfigError, EngineUnavailableError, RunFailedError
from rollfeed.store import RunReader
from rollfeed.types import Group, Rollout, TensorUpdate

REWARD = """
import logging
import time
from pathlib import Path

from rollfeed.generate import default_generate

HELD = Path(__file__).with_name("held")


def score(sample, prompt):
    while HELD.exists():
        time.sleep(0.01)
    return float(sample.response_token_ids.sum() % 7)


def fail(sample, prompt):
    raise ValueError("nothing to see")


def talk(sample, prompt):
    print("a reward")
    logging.getLogger("rollfeed.aloud").warning("a process of a pool has logged")
    return score(sample, prompt)


async def generate_aloud(request, *, services):
    print("an answer")
    logging.getLogger("rollfeed.aloud").info("an answer is logged")
    return await default_generate(request, services=services)
"""


PATIENT = {"timeout_seconds": 600.0}
"""Of ``[reward]``, where rewards wait."""

AGENT = """
import os
import signal
from functools import partial
from pathlib import Path

from rollfeed.generate import Episode

FOLDER = Path(__file__).parent


async def play(request, *, services):
    episode = Episode(request, services)
    turn = await episode.sample()
    line = f"{request.group_index} {request.index}"
    episode.tell(await episode.call("append", line, partial(append, line), if_lost="lost"))
    return episode.end(turn)


async def append(line):
    with (FOLDER / "effects").open("a") as file:
        file.write(line + chr(10))
    try:
        (FOLDER / "killed").touch(exist_ok=False)
    except FileExistsError:
        return "done"
    os.kill(os.getpid(), signal.SIGKILL)
"""


def settings_for(checkpoint: Path, **changed: dict[str, Any]) -> Settings:
    tree: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": str(checkpoint)},
        "prompts": {"environments": [{"id": "core/copy_text"}]},
        "rollout": {
            "num_rollout": 3,
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "over_sampling_batch_size": 5,
            "deterministic": True,
        },
        "sampling": {"rollout_max_response_len": 12},
        "engine": {"context_length": 256, "kernels": "torch", "precision": "fp32"},
        "reward": {"override_environments": True, "functions_in_workers": False},
        "plugins": {"reward": "elsewhere_reward:score"},
        "cluster": {"kind": "ray", "num_workers": 2, "startup_timeout_seconds": 600},
    }
    for name, values in changed.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Settings.model_validate({"seed": 3, **tree})


def prepared_on(hosting: ProcessHosting, spec: RunSpec) -> PreparedRun:
    prepared = prepare(spec)
    return replace(prepared, engine=cluster_engine(prepared.spec, prepared.engine, hosting=hosting))


def content_of(run: Path) -> dict[str, str]:
    files = sorted((*(run / "batches").iterdir(), *(run / "dropped").iterdir()))
    return {path.name: hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def host(fork_rollfeed: object) -> Callable[[], ProcessHosting]:
    """Return what makes a hosting; ``fork_rollfeed`` has everything imported where its processes are forked."""
    return partial(ProcessHosting, multiprocessing.get_context("forkserver"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere_reward.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def local(folder: Path, tiny_checkpoint: Path) -> dict[str, str]:
    spec = RunSpec(settings_for(tiny_checkpoint, cluster={"kind": "local"}), (folder,))
    asyncio.run(app.run(prepare(spec), out=folder / "local"))
    return content_of(folder / "local")


class Kills:
    """Kills the first worker when the first rollout of the run has been answered: no group ends before."""

    def __init__(self, hosting: ProcessHosting, folder: Path) -> None:
        self._hosting = hosting
        self._held = folder / "held"
        self._held.touch()

    def rollout_finished(self, rollout: Rollout) -> None:
        if self._held.exists():
            self._hosting.hosts[0].kill()
            self._held.unlink()

    def group_submitted(self, group: Group) -> None: ...
    def step_started(self, step: int) -> None: ...
    def group_decided(self, group: Group, decision: object) -> None: ...
    def waiting(self, message: str) -> None: ...
    def step_finished(self, commit: object) -> None: ...


def test_batches_are_those_of_a_local_run_byte_for_byte(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path, local: dict[str, str]
) -> None:
    hosting = host()
    spec = RunSpec(settings_for(tiny_checkpoint), (folder,))
    summary = asyncio.run(app.run(prepared_on(hosting, spec), out=folder / "run"))
    assert content_of(folder / "run") == local
    assert summary.ledger.balanced
    assert len(hosting.hosts) == 2
    assert hosting.is_left


def test_workers_ask_the_teacher_themselves(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    changed = {"rollout": {"num_rollout": 1}, "teacher": {"checkpoint": str(tiny_checkpoint), "temperature": 0.5}}
    local = RunSpec(settings_for(tiny_checkpoint, **changed, cluster={"kind": "local"}), (folder,))
    asyncio.run(app.run(prepare(local), out=folder / "here"))
    elsewhere = RunSpec(settings_for(tiny_checkpoint, **changed), (folder,))
    asyncio.run(app.run(prepared_on(host(), elsewhere), out=folder / "run"))
    assert content_of(folder / "run") == content_of(folder / "here")
    with RunReader(folder / "run") as reader:
        samples = [sample for group in reader.batch(0).groups for sample in group.samples]
    assert all(sample.teacher_logprobs is not None for sample in samples)


def test_what_judges_of_workers_were_asked_is_counted_by_the_run(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    async def run() -> int:
        async with judge_server(lambda text: "Score: 3" if len(text) % 2 else "hm") as server:
            judge = {"servers": [server.url], "model": "m", "rubric": "{response}"}
            changed = {
                "plugins": {"reward": None},
                "prompts": {"environments": [], "datasets": [{"path": str(rows), "apply_chat_template": False}]},
                "reward": {"rm_type": "judge", "judge": judge},
                "rollout": {"num_rollout": 2, "failure_budget": 1.0},
            }
            await app.run(prepared_on(host(), RunSpec(settings_for(tiny_checkpoint, **changed), (folder,))), out=out)
            return len(server.bodies)

    out, rows = folder / "run", folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(20)))
    num_requests = asyncio.run(run())
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    calls, hits, failed = (
        sum(step[f"judge/{name}"] for step in steps) for name in ("calls", "cache_hits", "error_unreadable")
    )
    assert calls + hits - failed >= 12
    assert failed > 0
    assert calls <= num_requests
    assert sum(step["judge/prompt_tokens"] for step in steps) == 20 * calls


def test_a_killed_worker_loses_and_doubles_nothing(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path, local: dict[str, str]
) -> None:
    hosting = host()
    prepared = prepared_on(hosting, RunSpec(settings_for(tiny_checkpoint, reward=PATIENT), (folder,)))
    summary = asyncio.run(app.run(prepared, out=folder / "run", observers=[Kills(hosting, folder)]))
    assert content_of(folder / "run") == local
    assert summary.ledger.balanced
    metrics = prepared.engine.metrics()
    assert metrics["lost_rollout_workers"] == 1
    assert metrics["groups_run_again"] >= 1


def test_the_last_worker_that_is_killed_is_waited_for(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path, local: dict[str, str]
) -> None:
    hosting = host()
    spec = RunSpec(settings_for(tiny_checkpoint, cluster={"num_workers": 1}, reward=PATIENT), (folder,))
    asyncio.run(app.run(prepared_on(hosting, spec), out=folder / "run", observers=[Kills(hosting, folder)]))
    assert content_of(folder / "run") == local
    assert len(hosting.hosts) == 2


def test_failures_at_workers_count_for_the_budget_of_the_run(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    settings = settings_for(tiny_checkpoint, plugins={"reward": "elsewhere_reward:fail"})
    prepared = prepared_on(host(), RunSpec(settings, (folder,)))
    with pytest.raises(RunFailedError, match="nothing to see"):
        asyncio.run(app.run(prepared, out=folder / "run"))


def test_weights_reach_all_workers_and_those_that_come_later(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    hosting = host()
    prepared = prepared_on(hosting, RunSpec(settings_for(tiny_checkpoint), (folder,)))
    engine = prepared.engine
    assert isinstance(engine, ClusterEngine)

    async def make(rollouts: Any) -> None:
        from safetensors.numpy import load_file

        await rollouts.generate_batch()
        tensors = {name: values * 1.5 for name, values in load_file(tiny_checkpoint / "model.safetensors").items()}
        await rollouts.update_weights(tensors, policy_version=7)
        assert engine.policy_version == 7
        hosting.hosts[0].kill()
        while len(hosting.hosts) < 3 or len(engine.workers.live) < 2:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)
        assert [place.policy_version for place in engine.workers.places] == [7, 7]
        batch = await rollouts.generate_batch()
        versions = {
            span.policy_version for group in batch.groups for each in group.samples for span in each.version_spans
        }
        assert versions == {7}

    asyncio.run(asyncio.wait_for(app.run(prepared, out=folder / "run", make_steps=make), 300))


def test_a_worker_without_the_model_is_named(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    prepared = prepared_on(host(), RunSpec(settings_for(tiny_checkpoint), (folder,)))
    engine = prepared.engine
    assert isinstance(engine, ClusterEngine)
    gone = settings_for(folder / "not-there")
    engine.workers._spec_of = lambda number, count: RunSpec(gone, (folder,))
    with pytest.raises(ConfigError, match="not-there"):
        asyncio.run(app.run(prepared, out=folder / "run"))


def test_a_cluster_whose_workers_do_not_come_up_ends_the_run(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    class Dead(ProcessHosting):
        async def start(self, factory: str, *args: Any, place: int | None) -> Any:
            host = await super().start(factory, *args, place=place)
            host.kill()
            return host

    settings = settings_for(tiny_checkpoint, cluster={"startup_timeout_seconds": 0.5})
    prepared = prepared_on(Dead(multiprocessing.get_context("forkserver")), RunSpec(settings, (folder,)))
    with pytest.raises(EngineUnavailableError, match="none of 2 rollout workers was ready"):
        asyncio.run(app.run(prepared, out=folder / "run"))


def test_a_call_of_a_tool_in_whose_middle_its_worker_died_is_not_made_again(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    (folder / "elsewhere_agent.py").write_text(AGENT)
    rollout = {"num_rollout": 1, "over_sampling_batch_size": 3}
    settings = settings_for(tiny_checkpoint, rollout=rollout, plugins={"generate": "elsewhere_agent:play"})
    prepared = prepared_on(host(), RunSpec(settings, (folder,)))
    summary = asyncio.run(app.run(prepared, out=folder / "run"))
    effects = (folder / "effects").read_text().splitlines()
    assert prepared.engine.metrics()["lost_rollout_workers"] == 1
    assert effects  # of the killed worker's other calls some may have been lost before they were made
    assert len(set(effects)) == len(effects)
    assert summary.ledger.trained == 3


class Refusing(Host):
    """A worker that takes no orders and tells of nothing."""

    name = "rollout worker 0"

    def __init__(self, error: Exception) -> None:
        self.is_killed = False
        self._error = error

    async def call(self, method: str, *args: Any) -> Any:
        if method == "take":
            raise self._error
        await asyncio.Event().wait()

    def kill(self) -> None:
        self.is_killed = True


class Watched:
    """An attempt that notes why it is lost."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def tell(self, event: object) -> None: ...

    def lose(self, error: HostDiedError) -> None:
        self.lost.append(str(error))


@pytest.mark.parametrize("error", [EngineUnavailableError("no server answers"), ValueError("no such order")])
def test_a_worker_that_takes_no_orders_is_lost_with_its_groups(
    error: Exception, host: Callable[[], ProcessHosting], tiny_checkpoint: Path
) -> None:
    async def main() -> None:
        cluster = settings_for(tiny_checkpoint).cluster
        workers = RolloutWorkers(host(), cluster, spec_of=lambda number, count: RunSpec(settings), num_workers=1)
        place, refusing, attempt = WorkerPlace(0), Refusing(error), Watched()
        place.host = refusing
        place.begin()
        place.attempts[0] = attempt
        place.order(AbortRequests())
        died = await workers._serve(place, refusing)
        assert str(error) in str(died)
        assert attempt.lost == [str(died)]
        assert refusing.is_killed
        assert not place.is_live

    settings = settings_for(tiny_checkpoint)
    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_group_ends_with_an_error_of_whoever_is_told_of_it(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path
) -> None:
    class Failing(Kills):
        def rollout_finished(self, rollout: Rollout) -> None:
            self._held.unlink(missing_ok=True)
            raise KeyError("an observer")

    hosting = host()
    prepared = prepared_on(hosting, RunSpec(settings_for(tiny_checkpoint), (folder,)))
    running = app.run(prepared, out=folder / "run", observers=[Failing(hosting, folder)])
    with pytest.raises(KeyError, match="an observer"):
        asyncio.run(asyncio.wait_for(running, 300))


def test_a_node_that_joined_with_another_rollfeed_starts_no_worker(tiny_checkpoint: Path) -> None:
    worker = RolloutWorker(RunSpec(settings_for(tiny_checkpoint)))
    with pytest.raises(EngineUnavailableError, match=r"^node \S+ has rollfeed .* this is 0\.0\.1"):
        asyncio.run(worker.open(wanted_of_nodes()._replace(rollfeed="0.0.1")))


def test_a_flush_with_nothing_on_its_way_ends_at_once(tiny_checkpoint: Path) -> None:
    worker = RolloutWorker(RunSpec(settings_for(tiny_checkpoint)))
    asyncio.run(asyncio.wait_for(worker._all_taken(), 60))


def test_what_workers_print_and_log_is_where_a_local_run_has_it(
    host: Callable[[], ProcessHosting], folder: Path, tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(
        tiny_checkpoint,
        rollout={"num_rollout": 1, "over_sampling_batch_size": 3},
        plugins={"reward": "elsewhere_reward:talk", "generate": "elsewhere_reward:generate_aloud"},
        reward={"functions_in_workers": True, "workers": {"num_workers": 1}},
    )
    with caplog.at_level("INFO", "rollfeed"):
        asyncio.run(app.run(prepared_on(host(), RunSpec(settings, (folder,))), out=folder / "run"))
    printed = (folder / "run" / "rewards.log").read_text().splitlines()
    assert printed.count("a reward") == printed.count("an answer") == 6
    assert (folder / "run" / "run.log").read_text().count("a process of a pool has logged") == 6
    told = {f"rollout worker {number}: an answer is logged" for number in range(2)}
    assert {message for name, _, message in caplog.record_tuples if name == "rollfeed.aloud"} == told


def test_a_reward_worker_gives_what_was_printed_once_and_in_whole_lines() -> None:
    async def main() -> None:
        worker = RewardWorker(RewardSettings.model_validate({"workers": {"num_workers": 1}}))
        folder = worker._output.printed.parent
        await worker.call("builtins:print", ["one\ntwo"], 60.0, False)
        assert read_events(await worker.output()) == [OutputWritten("rewards.log", b"one\ntwo\n")]
        with worker._output.printed.open("a") as file:
            file.write("begun")
        assert read_events(await worker.output()) == []
        with worker._output.printed.open("a") as file:
            file.write(" and ended\n")
        assert read_events(await worker.close()) == [OutputWritten("rewards.log", b"begun and ended\n")]
        assert not folder.exists()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_logged_is_kept_with_its_stack_and_what_cannot_be_said_ends_nothing() -> None:
    output, log = KeptOutput(), logging.getLogger("rollfeed.aloud")
    with output.keeping():
        output.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
        try:
            raise KeyError("left")
        except KeyError:
            log.exception("it failed")
        print("said")
    logged, written = output.take()
    assert isinstance(logged, LineLogged)
    assert (logged.logger, logged.level) == ("rollfeed.aloud", logging.ERROR)
    assert logged.text.splitlines()[0] == "it failed"
    assert logged.text.splitlines()[-1] == "KeyError: 'left'"
    assert written == OutputWritten("rewards.log", b"said\n")
    assert output.take() == []


def test_metrics_of_workers_are_those_of_one_engine_and_counts_outlive_their_worker(
    host: Callable[[], ProcessHosting], tiny_checkpoint: Path
) -> None:
    def told(tokens: float, stale: float, kv_use: float) -> dict[str, float]:
        return {
            "sampled_tokens": tokens,
            "stale_cache_tokens": stale,
            "stale_cache_share": stale / tokens,
            "kv_use": kv_use,
            "live_workers": 1.0,
            "weights_pause_seconds": kv_use,
        }

    async def main() -> None:
        settings = settings_for(tiny_checkpoint)
        workers = RolloutWorkers(
            host(), settings.cluster, spec_of=lambda number, count: RunSpec(settings), num_workers=2
        )
        workers.places = (WorkerPlace(0), WorkerPlace(1))
        engine = ClusterEngine(workers, IdleEngine(context_length=10, vocab_size=10))
        for place, values in zip(workers.places, (told(100.0, 10.0, 0.5), told(300.0, 0.0, 0.25)), strict=True):
            place.metrics = values
        metrics = engine.metrics()
        assert (metrics["sampled_tokens"], metrics["stale_cache_share"]) == (400.0, 10 / 400)
        assert (metrics["kv_use"], metrics["weights_pause_seconds"]) == (0.5, 0.5)
        assert metrics["live_workers"] == 2.0
        place, gone = workers.places[0], Refusing(HostDiedError("gone"))
        place.host = gone
        place.begin()
        place.order(AbortRequests())
        await workers._serve(place, gone)
        metrics = engine.metrics()
        assert (metrics["sampled_tokens"], metrics["stale_cache_share"]) == (400.0, 10 / 400)
        assert (metrics["kv_use"], metrics["live_workers"]) == (0.25, 1.0)

    asyncio.run(asyncio.wait_for(main(), 60))


class Hanging(Host):
    """A worker that answers nothing but questions of one kind."""

    name = "rollout worker 0"

    def __init__(self, answered: str) -> None:
        self.is_killed = False
        self._answered = answered

    async def call(self, method: str, *args: Any) -> Any:
        if method != self._answered:
            await asyncio.Event().wait()

    def kill(self) -> None:
        self.is_killed = True


def test_a_worker_that_does_not_take_weights_in_time_is_lost_and_others_go_on(
    host: Callable[[], ProcessHosting], tiny_checkpoint: Path
) -> None:
    async def main() -> None:
        settings = settings_for(tiny_checkpoint)
        cluster = settings.cluster.model_copy(update={"answer_timeout_seconds": 0.05})
        workers = RolloutWorkers(host(), cluster, spec_of=lambda number, count: RunSpec(settings), num_workers=2)
        workers.places = (WorkerPlace(0), WorkerPlace(1))
        hosts = hanging, taking = Hanging("pause"), Hanging("apply")
        for place, each in zip(workers.places, hosts, strict=True):
            place.host = each
            place.begin()
        engine = ClusterEngine(workers, IdleEngine(context_length=10, vocab_size=10))
        await engine.apply(TensorUpdate(policy_version=3, tensors={}))
        assert (hanging.is_killed, taking.is_killed) == (True, False)
        assert workers.live == [workers.places[1]]
        assert engine.policy_version == 3
        died = await workers._serve(workers.places[1], taking)  # it answers no poll
        assert "has not answered 'poll' within cluster.answer_timeout_seconds = 0.05" in str(died)
        assert taking.is_killed

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_run_whose_workers_have_gpus_and_servers_is_prepared_where_neither_is(
    folder: Path, tiny_checkpoint: Path
) -> None:
    on_gpus = settings_for(
        tiny_checkpoint,
        engine={"device": "cuda", "kernels": "auto", "precision": "bf16"},
        rollout={"deterministic": False},
    )
    assert isinstance(prepare(RunSpec(on_gpus, (folder,))).engine, ClusterEngine)
    launch = {"command": ["/only/on/nodes/sglang"], "num_servers": 2, "gpus_per_server": 4}
    launched = settings_for(
        tiny_checkpoint, engine={"sglang": {}, "launch": launch, "kernels": "auto", "precision": "auto"}
    )
    prepared = prepare(RunSpec(launched, (folder,)))
    assert isinstance(prepared.engine, ClusterEngine)
    assert prepared.settings.engine.launch is not None  # what workers are given
