"""rollfeed on a real SGLang server: concurrency, overhead, aborts, weights and their proof, training, a dying server.

Start one server for the figures, and two small ones that may die, for example on one GPU::

    python -m sglang.launch_server --model-path M --port 30000 --mem-fraction-static 0.4
    python -m sglang.launch_server --model-path M --port 30001 --mem-fraction-static 0.15
    python -m sglang.launch_server --model-path M --port 30002 --mem-fraction-static 0.15

then::

    python bench/gpu/sglang.py --model M --server http://127.0.0.1:30000 \\
        --pair http://127.0.0.1:30001 http://127.0.0.1:30002 --kill PID --output bench/gpu/sglang.json

``--parts weights proof versions train`` need the first server alone, and a checkpoint in bf16, which the trainer takes
to the same card.

PID is the process group of the second server of the pair; it is killed in the middle of a step. Every part
writes its result when it ends; a part that fails leaves its error in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

import rollfeed
from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.types import Completion, FolderUpdate, SamplingParams
from rollfeed.weights import DiskTransport

CONCURRENCIES = (64, 128, 256, 512)
NUM_REQUESTS = 1536
PROMPT_TOKENS = 150
NEW_TOKENS = 192
CONTEXT_LENGTH = 2048
ENVIRONMENTS = ("core/compare_max", "core/add_numbers", "core/copy_text", "core/constrained_words")


class Bench:
    """Runs the parts and keeps the result file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.model = rollfeed.load_model(str(arguments.model))
        self.result: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "workload": {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "seed": arguments.seed},
        }
        if arguments.parts and arguments.output.exists():
            self.result = json.loads(arguments.output.read_text(encoding="utf-8")) | self.result

    def engine(self, addresses: Sequence[str], **settings: Any) -> ServerEngine:
        """Return a client of these servers."""
        return ServerEngine(
            SGLang(SGLangSettings(workers=tuple(addresses), **settings)),
            context_length=CONTEXT_LENGTH,
            tokenizer=self.model.tokenizer,
            transport=DiskTransport(checkpoint=self.model.checkpoint),
        )

    def prompts(self, count: int) -> list[NDArray[np.int32]]:
        """Return prompts of random ids, each another one."""
        generator = np.random.default_rng(self.arguments.seed)
        return list(generator.integers(1000, 20_000, (count, PROMPT_TOKENS)).astype(np.int32))

    async def part(self, name: str, run: Callable[[], Awaitable[Any]]) -> None:
        """Run one part and write what it found."""
        if self.arguments.parts and name not in self.arguments.parts:
            return
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.arguments.seconds_a_part):
                self.result[name] = await run()
        except Exception as error:
            traceback.print_exc()
            self.result[name] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {time.perf_counter() - started:.0f} s  {json.dumps(self.result[name])[:1500]}", flush=True)
        self.arguments.output.write_text(json.dumps(self.result, indent=2) + "\n", encoding="utf-8")

    async def run(self) -> None:
        """Run all parts."""
        await self.part("rollfeed_run", self.rollfeed_run)
        await self.part("abort_and_resume", self.abort_and_resume)
        await self.part("weights", self.weights)
        await self.part("proof", self.proof)
        await self.part("versions", self.versions)
        await self.part("train", self.train)
        await self.part("concurrency", self.concurrency)
        await self.part("overhead", self.overhead)
        await self.part("server_killed", self.server_killed)

    async def proof(self) -> dict[str, Any]:
        """Publish trained weights, and at some versions others than those, and compare what both sides say."""
        from sglang_proof import Publisher

        return await Publisher(self).proof()

    async def versions(self) -> dict[str, Any]:
        """Publish different weights under load, and see which version each token is of."""
        from sglang_proof import Publisher

        return await Publisher(self).versions()

    async def train(self) -> dict[str, Any]:
        """Five steps of the command line in each way of changing weights."""
        from sglang_proof import train

        return {mode: await train(self, mode) for mode in ("abort", "retract", "in_place")}

    async def rollfeed_run(self) -> dict[str, Any]:
        """Several steps of the command line, with over-sampling, a filter and the aborts that come with them."""
        environments = "".join(f'[[prompts.environments]]\nid = "{name}"\nlevel = 1\n' for name in ENVIRONMENTS)
        settings = f"""seed = {self.arguments.seed}
[model]
checkpoint = "{self.model.checkpoint}"
[rollout]
num_rollout = 4
rollout_batch_size = 32
n_samples_per_prompt = 8
over_sampling_batch_size = 64
[sampling]
rollout_max_response_len = 256
[engine]
context_length = {CONTEXT_LENGTH}
[engine.sglang]
workers = ["{self.arguments.server}"]
[[filters.dynamic_sampling]]
name = "reward_std"
{environments}"""
        with tempfile.TemporaryDirectory() as folder:
            file, out = Path(folder) / "run.toml", Path(folder) / "run"
            file.write_text(settings, encoding="utf-8")
            command = [sys.executable, "-m", "rollfeed", "run", str(file), "--out", str(out)]
            started = time.perf_counter()
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
            code = await process.wait()
            seconds = time.perf_counter() - started
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        names = sorted({name for line in lines for name in line if name.startswith(("engine/", "rollout/", "perf/"))})
        return {
            "exit_code": code,
            "seconds": round(seconds, 2),
            "num_steps": len(lines),
            "by_step": {name: [line.get(name) for line in lines] for name in names},
        }

    async def abort_and_resume(self) -> dict[str, Any]:
        """Abort requests by id in the middle, go on from their tokens, and score the whole again."""
        differences: list[float] = []
        first_parts = []
        async with self.engine([self.arguments.server]) as engine:
            for index, prompt in enumerate(self.prompts(16)):
                params = SamplingParams(max_new_tokens=400, min_new_tokens=400)
                task = asyncio.create_task(engine.generate(prompt, params, request_id=f"a{index}"))
                await asyncio.sleep(0.3)
                await engine.abort(f"a{index}")
                begun = await task
                known = np.concatenate([prompt, begun.token_ids])
                rest = SamplingParams(max_new_tokens=100, min_new_tokens=100)
                ended = await engine.generate(known, rest, request_id=f"b{index}")
                whole = np.concatenate([known, ended.token_ids])
                scores = await self._score(whole, start=len(prompt))
                sampled = np.concatenate([begun.logprobs, ended.logprobs])
                differences.extend((sampled - scores).tolist())
                first_parts.append(len(begun.token_ids))
        absolute = np.abs(differences)
        return {
            "tokens_before_the_abort": first_parts,
            "tokens_scored": len(differences),
            "mean_absolute_difference": float(absolute.mean()),
            "p99_absolute_difference": float(np.quantile(absolute, 0.99)),
            "mean_difference": float(np.mean(differences)),
            "note": "a minimum length keeps stop tokens out of the sampled distribution, not of the scored one",
        }

    async def _score(self, token_ids: NDArray[np.int32], *, start: int) -> NDArray[np.float64]:
        """Return the server's logprobs of the tokens from ``start`` on."""
        body = {
            "input_ids": token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.post(f"{self.arguments.server}/generate", json=body) as response,
        ):
            response.raise_for_status()
            reply = await response.json()
        return np.array([entry[0] for entry in reply["meta_info"]["input_token_logprobs"]][1:], np.float64)

    async def weights(self) -> dict[str, Any]:
        """Load weights from disk between requests and under them, both ways of doing so."""
        found: dict[str, Any] = {}
        for mode in ("abort", "in_place"):
            async with self.engine([self.arguments.server], weight_update=mode) as engine:
                version = engine.policy_version
                started = time.perf_counter()
                await engine.apply(FolderUpdate(self.model.checkpoint, policy_version=version + 1))
                idle_seconds = time.perf_counter() - started
                params = SamplingParams(max_new_tokens=300, min_new_tokens=300)
                tasks = [
                    asyncio.create_task(engine.generate(prompt, params, request_id=f"w{index}"))
                    for index, prompt in enumerate(self.prompts(64))
                ]
                await asyncio.sleep(0.5)
                started = time.perf_counter()
                await engine.apply(FolderUpdate(self.model.checkpoint, policy_version=version + 2))
                busy_seconds = time.perf_counter() - started
                completions = await asyncio.gather(*tasks)
                found[mode] = {
                    "seconds_when_idle": round(idle_seconds, 3),
                    "seconds_under_64_requests": round(busy_seconds, 3),
                    "version_spans": _spans(completions, base=version),
                    "lengths": dict(Counter(len(each.token_ids) for each in completions)),
                    "metrics": dict(engine.metrics()),
                }
        return found

    async def concurrency(self) -> dict[str, Any]:
        """Compare fixed numbers of requests with the one that is found."""
        rates: dict[int, float] = {}
        for count in CONCURRENCIES:
            async with self.engine([self.arguments.server], concurrency=count) as engine:
                rates[count] = await self._throughput(engine, num_requests=NUM_REQUESTS)
        best = max(rates, key=lambda count: rates[count])
        limits: list[float] = []
        adaptive, fixed = [], []
        async with (
            self.engine([self.arguments.server]) as engine,
            self.engine([self.arguments.server], concurrency=best) as other,
        ):
            finding = [await self._throughput(engine, num_requests=NUM_REQUESTS, limits=limits) for _ in range(2)]
            for _ in range(3):
                adaptive.append(await self._throughput(engine, num_requests=NUM_REQUESTS, limits=limits))
                fixed.append(await self._throughput(other, num_requests=NUM_REQUESTS))
        return {
            "fixed_tokens_per_second": {str(count): round(rate) for count, rate in rates.items()},
            "best_fixed": best,
            "adaptive_while_it_searches": [round(rate) for rate in finding],
            "adaptive_limits": limits,
            "adaptive_tokens_per_second": [round(rate) for rate in adaptive],
            "best_fixed_in_turn": [round(rate) for rate in fixed],
            "adaptive_to_best": round(statistics.median(adaptive) / statistics.median(fixed), 3),
        }

    async def _throughput(self, engine: ServerEngine, *, num_requests: int, limits: list[float] | None = None) -> float:
        """Return tokens per second over all requests; their lengths differ, so that they do not end together."""
        generator = np.random.default_rng(self.arguments.seed)
        lengths = generator.integers(NEW_TOKENS // 2, 3 * NEW_TOKENS // 2, num_requests).tolist()
        ends: list[int] = []

        async def one(index: int, prompt: NDArray[np.int32]) -> None:
            params = SamplingParams(max_new_tokens=lengths[index], min_new_tokens=lengths[index])
            completion = await engine.generate(prompt, params, request_id=f"c{index}")
            ends.append(len(completion.token_ids))
            if limits is not None and len(ends) % 128 == 0:
                limits.append(engine.metrics()["concurrency_limit"])

        started = time.perf_counter()
        await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(self.prompts(num_requests))))
        return sum(ends) / (time.perf_counter() - started)

    async def overhead(self) -> dict[str, Any]:
        """Time whole steps with everything on, and the bare requests of such a step, in turn."""
        length, groups, members = 192, 64, 8
        config = rollfeed.RolloutConfig(
            seed=self.arguments.seed,
            rollout=rollfeed.RolloutSettings(rollout_batch_size=groups, n_samples_per_prompt=members),
            sampling=rollfeed.SamplingSettings(rollout_max_response_len=length, min_new_tokens=length),
        )
        source = rollfeed.environment_source(
            ENVIRONMENTS[0], level=1, seed=self.arguments.seed, tokenizer=self.model.tokenizer
        )
        prompts = [prompt.token_ids for prompt in await source.draw(groups)]
        params = SamplingParams(max_new_tokens=length, min_new_tokens=length)
        whole, bare = [], []
        cpu_seconds = 0.0
        fixed = 256

        async def bare_requests() -> float:
            async with self.engine([self.arguments.server], concurrency=fixed) as engine:
                started = time.perf_counter()
                await asyncio.gather(
                    *(
                        engine.generate(prompt, params, request_id=f"{index}-{member}")
                        for index, prompt in enumerate(prompts)
                        for member in range(members)
                    )
                )
                return time.perf_counter() - started

        rollouts = rollfeed.open_rollouts(
            config,
            source=source,
            engine=self.engine([self.arguments.server], concurrency=fixed),
            tokenizer=self.model.tokenizer,
        )
        async with rollouts:
            await rollouts.generate_batch()
            for _ in range(12):
                started, cpu_started = time.perf_counter(), time.process_time()
                await rollouts.generate_batch()
                whole.append(time.perf_counter() - started)
                cpu_seconds += time.process_time() - cpu_started
                bare.append(await bare_requests())
        return {
            "whole_step_seconds": [round(seconds, 3) for seconds in whole],
            "bare_requests_seconds": [round(seconds, 3) for seconds in bare],
            "overhead": round(sum(whole) / sum(bare) - 1.0, 4),
            "overhead_by_medians": round(statistics.median(whole) / statistics.median(bare) - 1.0, 4),
            "share_of_client_cpu": round(cpu_seconds / sum(whole), 4),
        }

    async def server_killed(self) -> dict[str, Any]:
        """Kill one of two servers in the middle of a step, and finish the step."""
        config = rollfeed.RolloutConfig(
            seed=self.arguments.seed,
            rollout=rollfeed.RolloutSettings(rollout_batch_size=32, n_samples_per_prompt=8),
            sampling=rollfeed.SamplingSettings(rollout_max_response_len=400, min_new_tokens=400),
        )
        engine = self.engine(self.arguments.pair, probe_interval_seconds=1.0, probe_timeout_seconds=2.0)
        source = rollfeed.environment_source(
            ENVIRONMENTS[2], level=2, seed=self.arguments.seed, tokenizer=self.model.tokenizer
        )
        rollouts = rollfeed.open_rollouts(config, source=source, engine=engine, tokenizer=self.model.tokenizer)
        async with rollouts:
            task = asyncio.create_task(rollouts.generate_batch())
            await asyncio.sleep(1.5)
            in_flight = engine.metrics()["requests_in_flight"]
            os.killpg(self.arguments.kill, signal.SIGKILL)
            killed = time.perf_counter()
            batch = await task
            seconds = time.perf_counter() - killed
            metrics = dict(engine.metrics())
        lengths = Counter(sample.response_length for sample in batch.samples)
        return {
            "requests_in_flight_at_the_kill": in_flight,
            "seconds_from_the_kill_to_the_batch": round(seconds, 2),
            "num_samples": len(batch.samples),
            "response_lengths": {str(length): count for length, count in lengths.items()},
            "metrics": metrics,
        }


def _spans(completions: Sequence[Completion], *, base: int) -> dict[str, int]:
    """Count completions by the versions of their spans, relative to the first version."""
    kinds = Counter(
        " then ".join(f"v{span.policy_version - base}" for span in each.version_spans) for each in completions
    )
    return dict(kinds)


def machine() -> dict[str, Any]:
    """Return the card and the processor."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        card = "none"
    return {"card": card, "cores": os.cpu_count(), "python": sys.version.split()[0]}


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the servers' checkpoint, with its tokenizer")
    parser.add_argument("--server", required=True, help="address of the server for the figures")
    parser.add_argument("--pair", nargs=2, default=(), help="addresses of two servers, of which the second dies")
    parser.add_argument("--kill", type=int, help="process group of the second server of the pair")
    parser.add_argument("--parts", nargs="*", default=(), help="only these; the others stay in the file as they are")
    parser.add_argument("--seconds-a-part", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    asyncio.run(Bench(parser.parse_args()).run())


if __name__ == "__main__":
    main()
