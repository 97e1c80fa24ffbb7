"""Processor time of a gateway a turn; agents, engine and a server that echoes the same bodies are other processes.

Conversations end at one number of tokens: three quarters of it are a system message that all of them have, as coding
agents do; half of the rest is sampled, the other half is what a tool gave back. Each turn calls the tool, and is
streamed.
"""

from __future__ import annotations

import inspect
import pydoc
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from rollfeed.app import Model
from rollfeed.benchmarks.gateway.agent_process import AgentsJob
from rollfeed.benchmarks.gateway.fake_policy import read_sampled
from rollfeed.benchmarks.gateway.gateway_processes import (
    ECHO,
    ENGINE,
    GatewayProcess,
    cpu_seconds,
    run_agents,
    serving,
    write_model,
)
from rollfeed.benchmarks.gateway.sampled_once import SampledOnce, compare
from rollfeed.benchmarks.gateway.talks import Api
from rollfeed.protocols import Tokenizer

GOALS = {"cpu_milliseconds_per_turn": 2.0}
_SHARE_OF_SYSTEM = 0.75
_CALL_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayWorkload:
    """Conversations of agents."""

    context_tokens: int = 8192
    """Of a conversation at its end."""
    num_turns: int = 10
    num_sessions: int = 16
    """Of each API, in each repetition."""
    in_flight: int = 8
    """Sessions at once."""
    repetitions: int = 5
    seed: int = 0

    @property
    def system_tokens(self) -> int:
        """Size of the system message."""
        return int(_SHARE_OF_SYSTEM * self.context_tokens)

    @property
    def turn_tokens(self) -> int:
        """Number sampled in a turn, and told after it."""
        return (self.context_tokens - self.system_tokens) // (2 * self.num_turns)


def bench_gateway(workload: GatewayWorkload, model: Model, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure each API in turn and return JSON values; ``passed`` says whether the samples are what was sampled.

    The model's tokenizer is used, with a chat template that shows tools.

    Raises:
        RollfeedError: If a process fails.
    """
    texts = _texts(model.tokenizer, system_tokens=workload.system_tokens, part_tokens=workload.turn_tokens)
    costs: dict[Api, list[float]] = {api: [] for api in Api}
    echoes: dict[Api, list[float]] = {api: [] for api in Api}
    num_turns = workload.num_sessions * workload.num_turns
    with tempfile.TemporaryDirectory(prefix="rollfeed-gateway-") as name:
        folder = Path(name)
        write_model(folder / "model", model.checkpoint)
        sampled = folder / "sampled.jsonl"
        policy = [str(folder / "model"), str(sampled), str(workload.turn_tokens - _CALL_TOKENS), str(workload.seed)]
        with (
            serving(ENGINE, policy) as (engine, _),
            serving(ECHO) as (echo, echo_pid),
            GatewayProcess(folder / "gateway", model=folder / "model", engine=engine) as gateway,
        ):
            for repetition in range(-1, workload.repetitions):  # the first is for what is computed once
                for api in Api:
                    job = AgentsJob(
                        address=gateway.address,
                        echo=echo,
                        api=api,
                        num_sessions=workload.num_sessions,
                        num_turns=workload.num_turns,
                        in_flight=workload.in_flight,
                        **texts,
                    )
                    before = cpu_seconds(gateway.process.pid), cpu_seconds(echo_pid)
                    run_agents(job)
                    if repetition >= 0:
                        costs[api].append(1e3 * (cpu_seconds(gateway.process.pid) - before[0]) / num_turns)
                        echoes[api].append(1e3 * (cpu_seconds(echo_pid) - before[1]) / num_turns)
                        progress(f"{api}: {costs[api][-1]:.2f} ms a turn, {echoes[api][-1]:.2f} ms of the echo")
            found = compare(gateway.samples(), read_sampled(sampled))
    return _result(workload, costs, echoes, found)


def _result(
    workload: GatewayWorkload, costs: dict[Api, list[float]], echoes: dict[Api, list[float]], found: SampledOnce
) -> dict[str, Any]:
    ours, echo = ([sum(each) / len(Api) for each in zip(*by_api.values(), strict=True)] for by_api in (costs, echoes))
    return {
        "cpu_milliseconds_per_turn": median(ours),
        "cpu_milliseconds_per_turn_by_repetition": ours,
        "cpu_milliseconds_per_turn_by_api": {api.value: median(each) for api, each in costs.items()},
        "echo_milliseconds_per_turn": median(echo),
        "ratio_to_echo": median(ours) / median(echo) if median(echo) else None,
        "goals": GOALS,
        "samples": {**msgspec.structs.asdict(found)},
        "passed": not (found.unsampled or found.doubled or found.untrained),
        "workload": asdict(workload),
        "seed": workload.seed,
    }


def _texts(tokenizer: Tokenizer, *, system_tokens: int, part_tokens: int) -> dict[str, Any]:
    """Return texts of about so many tokens: source code, as agents read it."""
    source = inspect.getsource(inspect) + inspect.getsource(pydoc)
    _, ends = tokenizer.encode_with_offsets(source)
    system_end = int(ends[min(system_tokens, len(ends) - 1), 1])
    part = int(part_tokens * len(source) / len(ends))
    return {"system": source[:system_end], "source": source[system_end:], "part": part}
