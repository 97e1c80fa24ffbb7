from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from rollfeed.benchmarks.client import ClientWorkload, SlimeCheckout, bench_client
from rollfeed.benchmarks.client_process import array_sizes
from rollfeed.benchmarks.client_slime import version_of
from rollfeed.errors import ConfigError
from rollfeed.testing import make_group
from rollfeed.types import Group, TrainBatch

WORKLOAD = ClientWorkload(
    repetitions=1, samples_per_step=16, min_tokens=100, others_min_tokens=100, n_samples_per_prompt=4
)
SLIME = {
    "__init__.py": "",
    "rollout/__init__.py": "",
    "rollout/sglang_rollout.py": """
from types import SimpleNamespace
from slime.utils import http_utils

class GenerateState:
    sampling_params = {}

    def __init__(self, args):
        assert args.no_such_flag is None

async def generate_rollout_async(args, rollout_id, data_source):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    for group in data_source(args.rollout_batch_size):
        assert len(group) == args.n_samples_per_prompt
        for sample in group:
            body = {"input_ids": [7] * len(sample.prompt), "sampling_params": GenerateState.sampling_params}
            reply = await http_utils.client.post(f"{url}/generate", json={**body, "return_logprob": True})
            assert len(reply.json()["meta_info"]["output_token_logprobs"]) == args.rollout_max_response_len
    assert (await http_utils.client.get(f"{url}/workers")).json()["workers"]
    return SimpleNamespace(samples=[]), []
""",
    "utils/__init__.py": "",
    "utils/http_utils.py": """
import httpx

def init_http_client(args):
    global client
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=args.sglang_server_concurrency))
""",
    "utils/types.py": "from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample as Sample",
    "utils/async_utils.py": """
import asyncio, threading
LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()

def run(work):
    return asyncio.run_coroutine_threadsafe(work, LOOP).result()
""",
    "rollout/base_types.py": "from rollfeed.compat.slime_plugins.names.forms import RolloutFnTrainOutput",
}
"""The names that the bench asks of a checkout, with next to nothing behind them."""


def batch_of(group: Group) -> TrainBatch:
    advantages = np.zeros(len(group.samples), np.float32)
    return TrainBatch(step=0, policy_version=0, groups=(group,), advantages_S=advantages, metrics={})


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what is asked of slime, which answers each sample with the tokens that the server sends."""
    for name, text in SLIME.items():
        path = tmp_path / "slime" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_one_cell_has_its_figures_and_those_of_slime_at_the_top(checkout: Path) -> None:
    pytest.importorskip("httpx")
    told: list[str] = []
    slime = SlimeCheckout(folder=checkout, compat=True)
    result = bench_client(tokens=[40], in_flight=[5], workload=WORKLOAD, progress=told.append, slime=slime)
    for client in ("", "reference_", "slime_", "compat_"):
        assert result[f"{client}cpu_seconds_per_million_tokens"] > 0
        assert result[f"{client}samples_per_second"] > 0
    assert result["peak_memory_mb"] > 0
    shared_mask = 4 * (1 << 15) / (16 * 40)  # which all samples of a process share
    assert result["bytes_per_token"] == pytest.approx(4 * (2 * 40 + 150) / 40 + shared_mask)
    assert result["seed"] == 0
    assert len(told) == 1
    theirs = result["slime_cpu_seconds_per_million_tokens"]
    assert result["slime_ratio"] == theirs / result["cpu_seconds_per_million_tokens"]
    assert result["compat_ratio"] == theirs / result["compat_cpu_seconds_per_million_tokens"]
    assert result["reference_over_slime"] == result["reference_cpu_seconds_per_million_tokens"] / theirs
    assert result["slime"].keys() == {"files_sha256"}


def test_a_checkout_is_known_by_its_commit_or_its_files(checkout: Path) -> None:
    before = version_of(checkout)
    assert version_of(checkout) == before
    (checkout / "slime" / "utils" / "types.py").write_text("Sample = None")
    assert version_of(checkout) != before
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(checkout), *command], check=True)
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert version_of(checkout) == {"commit": head.stdout.strip()}


def test_what_is_no_checkout_of_slime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkout of slime: it has no slime/rollout/sglang_rollout\.py"):
        version_of(tmp_path)


def test_cells_of_one_length_are_compared() -> None:
    pytest.importorskip("httpx")
    result = bench_client(tokens=[20], in_flight=[4, 18], workload=WORKLOAD, progress=lambda line: None)
    assert [(cell["tokens"], cell["in_flight"]) for cell in result["cells"]] == [(20, 4), (20, 18)]
    assert result["most_over_least_in_flight"].keys() == {"20"}
    assert result["most_over_least_in_flight"]["20"] >= 1


def test_a_view_counts_as_all_that_it_keeps_in_memory() -> None:
    group = make_group(rewards=[0.0, 1.0])
    before, num_tokens = array_sizes(batch_of(group))
    sample = group.samples[0]
    object.__setattr__(sample, "logprobs", np.zeros(1000, np.float32)[: sample.response_length])
    after, same_tokens = array_sizes(batch_of(group))
    assert same_tokens == num_tokens
    assert after == before - 4 * sample.response_length + 4000
