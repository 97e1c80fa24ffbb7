"""A reward model that a real vLLM and a real SGLang serve on the CPU, and faults between them and a run."""

from __future__ import annotations

import asyncio
import json
import runpy
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.engines.faults import broken, busy_once, cut, faulty, hang, nonsense
from tests.engines.servers import RealServer, sglang_server, vllm_server

from rollfeed.app.rewards import open_reward_hub
from rollfeed.app.scoring.reward_models import RunRewardModel
from rollfeed.cli.main import main
from rollfeed.config import RewardSettings
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.store import RunReader
from rollfeed.types import Outcome, Verdict

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_model"
TOLERANCE = 1e-4
"""Of scores from -10 to 10, in float32 on both sides; 6e-6 was seen."""
SGLANG_FLAGS = ("--is-embedding", "--dtype", "float32", "--mem-fraction-static", "0.3")
START: dict[str, Callable[[Path, Path], AbstractContextManager[RealServer]]] = {
    "vllm": lambda model, work: vllm_server(model, work, "--runner", "pooling"),
    "sglang": lambda model, work: sglang_server(model, work, *SGLANG_FLAGS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, and a model that it has trained for a while, with heads that vLLM has a kernel for."""
    made = tmp_path_factory.mktemp("example")
    for name in ("train.toml", "run.toml"):
        shutil.copyfile(EXAMPLE / name, made / name)
    sys.argv[1:], before = [str(made)], sys.argv[1:]
    runpy.run_path(str(EXAMPLE / "write_pairs.py"))
    sys.argv[1:] = before
    small = ("--set", "rollout.num_rollout=60", "--set", "model.tiny.num_heads=1")
    assert main(["train", str(made / "train.toml"), "--out", str(made / "trained"), *small]) == 0
    return made


@pytest.fixture(scope="module", params=list(START))
def served(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The kind of a server and its address."""
    with START[request.param](folder / "trained" / "model", tmp_path_factory.mktemp(request.param)) as server:
        yield request.param, server.address


def model_of(folder: Path, **settings: Any) -> RewardSettings:
    about = {"checkpoint": str(folder / "trained" / "model"), "device": "cpu", **settings}
    return RewardSettings(rm_type="reward_model", model=about)


async def graded(folder: Path, **settings: Any) -> list[Verdict]:
    """Verdicts on both answers of held-out pairs."""
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()[:20]]
    async with open_reward_hub(model_of(folder, **settings)) as hub:
        asked = [(row[name], row["prompt"]) for row in rows for name in ("chosen", "rejected")]
        return list(await asyncio.gather(*(hub.grade(answer, None, prompt=prompt) for answer, prompt in asked)))


async def test_scores_are_those_of_the_model_here(served: Any, folder: Path) -> None:
    kind, address = served
    here, there = await graded(folder), await graded(folder, servers=[address], kind=kind)
    assert [each.reward for each in there] == pytest.approx([each.reward for each in here], abs=TOLERANCE)
    assert len({round(each.reward, 3) for each in here}) > 20


async def test_vllm_scores_tokens_where_it_is_started_for_that(folder: Path, tmp_path: Path) -> None:
    flags = ("--runner", "pooling", "--pooler-config", '{"task": "token_classify"}')
    with vllm_server(folder / "trained" / "model", tmp_path, *flags) as server:
        about: Any = {"unit": "token", "aggregate": "mean"}
        here = await graded(folder, **about)
        there = await graded(folder, **about, servers=[server.address], kind="vllm")
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.step_scores == pytest.approx(ours.step_scores, abs=TOLERANCE)
        assert len(theirs.step_scores) > 1


async def run_through(folder: Path, out: Path, kind: str, address: str, *more: str) -> tuple[int, str]:
    model = f"reward.model.checkpoint={folder / 'trained' / 'model'}"
    words = [model, f"reward.model.servers={json.dumps([address])}", f"reward.model.kind={kind}"]
    words += ["model.tiny.num_heads=1", "rollout.n_samples_per_prompt=2", *more]
    options = [word for each in words for word in ("--set", each)]
    command = ["-m", "rollfeed", "run", str(folder / "run.toml"), "--out", str(out), *options]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, told.decode()


@pytest.mark.parametrize("fault", [hang, busy_once, cut, nonsense, broken])
async def test_faults_on_the_way_are_counted_and_no_wrong_score_is_stored(
    served: Any, folder: Path, tmp_path: Path, fault: Any
) -> None:
    kind, address = served
    once = ("reward.model.max_tries=1", "reward.model.timeout_seconds=5", "rollout.failure_budget=1.0")
    more = once if fault is not busy_once else ("reward.model.max_tries=5",)
    async with faulty(address, fault, injures=lambda body: zlib.crc32(body) % 3 == 0) as (proxy, before):
        code, told = await run_through(folder, tmp_path / "run", kind, before, *more)
    assert code == 0, told
    assert proxy.num_injured
    reader = RunReader(tmp_path / "run")
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors, timeouts = (sum(step[f"rollout/reward_{name}"] for step in steps) for name in ("error", "timeout"))
    if fault is busy_once:
        assert (errors, timeouts) == (0, 0)
    else:
        assert 0 < (timeouts if fault is hang else errors) <= proxy.num_injured
        assert (errors if fault is hang else timeouts) == 0
    async with RunRewardModel(model_of(folder)) as here:
        here.prepare(load_tokenizer(folder / "trained" / "model"))
        num_samples = 0
        for step in range(len(steps)):
            for group in reader.batch(step).groups:
                for sample in group.samples:
                    verdict = await here(sample, group.prompt)
                    assert verdict.outcome is Outcome.OK
                    assert sample.reward == pytest.approx(verdict.reward, abs=TOLERANCE)
                    num_samples += 1
    assert num_samples == 32
    assert await asyncio.to_thread(main, ["lint", str(tmp_path / "run")]) == 0


async def test_a_server_that_says_nothing_of_use_ends_the_run_with_the_reason(
    served: Any, folder: Path, tmp_path: Path
) -> None:
    kind, address = served
    async with faulty(address, nonsense, injures=lambda body: True) as (_, before):
        code, told = await run_through(folder, tmp_path / "run", kind, before)
    assert code != 0
    assert "more than rollout.failure_budget" in told
    assert "the reply is no score" in told
    assert "Traceback" not in told
