import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.session_replay.replay_bench import bench_replay, most_hit_rate
from bench.session_replay.server_choices import POLICIES, ConsistentHashing
from bench.session_replay.session_traces import SessionsWorkload, make_sessions, turns_by_rank

from rollfeed.benchmarks.machine import command_environment
from rollfeed.routing import ServerLoadView

SMALL = SessionsWorkload(
    num_sessions=24,
    n_samples_per_prompt=4,
    num_engines=3,
    num_slots=2,
    mean_turns=6,
    task_tokens=256,
    prompt_tokens=64,
    arrival_seconds=2.0,
    page_tokens=16,
)


def test_every_policy_replays_all_conversations_and_ours_finds_what_is_cached() -> None:
    told: list[str] = []
    result = bench_replay(SMALL, cache_tokens=[20_000, 200_000], seeds=[0, 1], progress=told.append)
    assert len(told) == 2 * len(POLICIES) + 2 * 2
    sessions = make_sessions(SMALL)
    num_turns = sum(len(session.turns) for session in sessions)
    for cell in result["cells"]:
        assert {figures["requests"] for figures in cell["policies"].values()} == {num_turns}
        hashing = cell["policies"]["consistent_hashing"]
        assert hashing["moves"] == 0
        assert max(each["hit_rate"] for each in cell["policies"].values()) <= cell["most_hit_rate"]
    roomy = result["cells"][1]["policies"]
    assert roomy["ours"]["hit_rate"] > 0.7
    assert roomy["ours"]["hit_rate"] > roomy["round_robin"]["hit_rate"]
    assert result["worst_wall_ratio"] == min(cell["wall_ratio"] for cell in result["cells"])


def test_a_replay_is_the_same_again() -> None:
    results = [bench_replay(SMALL, cache_tokens=[20_000], seeds=[3], progress=lambda _: None) for _ in range(2)]
    assert results[0] == results[1]


def test_turns_follow_the_law_within_their_limits() -> None:
    workload = SessionsWorkload()
    turns = turns_by_rank(workload)
    assert turns.sum() == pytest.approx(workload.num_sessions * workload.mean_turns, rel=0.01)
    assert (turns.max(), turns.min()) == (48, 9)
    assert turns[100] / turns[200] == pytest.approx((201 / 101) ** 0.5, rel=0.1)
    assert set(turns_by_rank(SessionsWorkload(turns_skew=0.0)).tolist()) == {16}


def test_conversations_of_a_group_begin_alike_and_those_of_a_task_nearly() -> None:
    sessions = make_sessions(SMALL)
    first = {session.name: session.turns[0].told.tolist() for session in sessions}
    groups = {session.group: first[session.name] for session in sessions}
    assert all(groups[session.group] == first[session.name] for session in sessions)
    beginnings = {tuple(prompt[: SMALL.task_tokens]) for prompt in groups.values()}
    assert len(beginnings) < len(groups) == len({tuple(prompt) for prompt in groups.values()})
    assert 0.8 < most_hit_rate(sessions) < 1.0


def test_hashing_moves_few_conversations_when_a_server_goes() -> None:
    servers = [ServerLoadView(f"http://{index}", 0, 0) for index in range(8)]
    prompt = make_sessions(SMALL)[0].turns[0].told

    def homes(candidates: list[ServerLoadView]) -> list[str]:
        policy = ConsistentHashing()
        return [policy.choose(candidates, prompt, session=f"s{index}", group="g") for index in range(400)]

    before, after = homes(servers), homes(servers[1:])
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    assert moved == before.count("http://0")


def test_routers_are_measured_on_real_servers(tmp_path: Path) -> None:
    out = tmp_path / "router.json"
    sizes = ["--sessions", "8", "--speed", "500", "--repetitions", "1", "--turns", "2", "--prompt-tokens", "100"]
    script = Path(__file__).parents[2] / "bench" / "router.py"
    command = [sys.executable, str(script), "routers", *sizes, "--out", str(out)]
    ran = subprocess.run(command, env=command_environment(), capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(out.read_text())
    assert figures["replayed"].keys() == figures["added"].keys() == {"direct", "rollfeed"}
    assert figures["control"]["rollfeed"]["/update_weights_from_disk"] == "200, 2 of 2 servers"
    direct, router = (figures["replayed"][name] for name in ("direct", "rollfeed"))
    assert direct["requests"] == router["requests"] > 8
    assert min(direct["hit_rate"], router["hit_rate"]) > 0.5
    assert (direct["cpu_ms_per_request"], router["cpu_ms_per_request"] > 0.0) == (0.0, True)
