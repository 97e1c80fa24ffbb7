"""A run whose engine is two servers of the embedded engine, each in a process of its own."""

import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

SERVE = ("--port", "0", "--threads", "1", "--num-slots", "4", "--context-length", "384", "--kernels", "torch")


def address_of(process: Any) -> str:
    """Return where a server listens; waits until it does."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"serving .* at (http://\S+)", line):
            return found[1]
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def servers(fork_rollfeed: Callable[..., Any], tiny_checkpoint: Path) -> Iterator[list[str]]:
    processes = [fork_rollfeed("serve", "engine", "--model", tiny_checkpoint, *SERVE) for _ in range(2)]
    try:
        yield [address_of(process) for process in processes]
        for process in processes:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0
    finally:
        for process in processes:
            process.close()


def ask(address: str, path: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        text: str = response.read().decode()
    return text


def num_there(address: str) -> int:
    """How many requests a server has."""
    load = json.loads(ask(address, "/v1/loads?include=core"))["loads"][0]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


def rescored(address: str, token_ids: list[int]) -> np.ndarray:
    """Log-probability of each token but the first, given those before it."""
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    body = {"input_ids": token_ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    pairs = json.loads(ask(address, "/generate", body))["meta_info"]["input_token_logprobs"]
    assert [token_id for _, token_id, _ in pairs] == token_ids
    return np.array([logprob for logprob, _, _ in pairs[1:]])


def test_a_run_on_two_servers_has_the_logprobs_of_a_rescoring(
    rollfeed: Any,
    settings_file: Callable[..., Path],
    servers: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    out, settings = tmp_path / "run", settings_file(num_rollout=2)
    workers = f"engine.sglang.workers={json.dumps(servers)}"
    ran = rollfeed("run", settings, "--out", out, "--set", workers, "--set", "engine.sglang.concurrency=8")
    assert ran.code == 0, ran.err
    rows = [row for path in sorted((out / "batches").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 2 * 3 * 2
    for row in rows:
        assert row["response_length"] == len(row["logprobs"]) > 0
        scored = rescored(servers[0], row["token_ids"])[-row["response_length"] :]
        np.testing.assert_allclose(row["logprobs"], scored, atol=1e-4)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert steps[1]["engine/requests"] >= len(rows)
    assert steps[1]["engine/live_workers"] == 2
    assert steps[1]["engine/rejected_replies"] == 0
    deadline = time.monotonic() + 60
    while any(num_there(server) for server in servers):  # those that the end of a step aborted go at the next turn
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answered = [
        line for server in servers for line in ask(server, "/metrics").splitlines() if "requests_total{" in line
    ]
    assert sum(float(line.split()[-1]) for line in answered) >= len(rows)


def test_a_run_without_its_servers_fails_in_one_line_and_can_go_on(
    rollfeed: Any, settings_file: Callable[..., Path], servers: list[str], tmp_path: Path
) -> None:
    out, settings = tmp_path / "run", settings_file(num_rollout=1)
    nowhere = ("--set", 'engine.sglang.workers=["http://127.0.0.1:9"]')
    ran = rollfeed("run", settings, "--out", out, *nowhere, "--set", "engine.sglang.startup_timeout_seconds=0.5")
    assert ran.code == 1, ran.out
    assert "not there within startup_timeout_seconds = 0.5: http://127.0.0.1:9" in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    again = rollfeed("run", settings, "--out", out, "--set", f"engine.sglang.workers={json.dumps(servers)}")
    assert again.code == 0, again.err
