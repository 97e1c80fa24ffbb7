"""``rollfeed bench``: measure this machine, ours and a reference in turn."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed import app
from rollfeed.benchmarks.machine import machine
from rollfeed.cli import bench_fleet, bench_lines, exit_codes
from rollfeed.cli.arguments import Parsers, add_actions, add_command, add_flags, add_numbers, add_path
from rollfeed.engine import DEFAULT_MODEL, gguf_file_of
from rollfeed.errors import ConfigError

Progress = Callable[[str], None]


class _Bench(NamedTuple):
    """One action: its options, its measurement, and how the figures read."""

    measure: Callable[[argparse.Namespace, Progress], dict[str, Any]]
    """Returns JSON values; a result that has ``passed`` and it false fails."""
    lines: Callable[[dict[str, Any]], Iterator[str]]
    help: str
    description: str
    example: str
    numbers: Mapping[str, tuple[int | float, str, int | float]]
    """Default, help and the least value of each option."""
    add_others: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def register(commands: Parsers) -> None:
    """Add the command and its actions to the parser."""
    actions = add_actions(commands, "bench")
    for name, bench in _BENCHES.items():
        parser = add_command(
            actions,
            name,
            partial(_run, bench),
            help=bench.help,
            description=bench.description,
            epilog=f"example: rollfeed bench {name} {bench.example}",
        )
        bench.add_others(parser)
        add_numbers(parser, {option: (default, told) for option, (default, told, _) in bench.numbers.items()})
        add_flags(parser, json="one JSON object; progress goes to stderr")


def _run(bench: _Bench, arguments: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    for option, (_, _, least) in bench.numbers.items():
        given = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if any(number < least for number in (given if isinstance(given, list) else [given])):
            raise ConfigError(f"{option} must be at least {least}")
    result = bench.measure(arguments, lambda line: print(line, file=sys.stderr, flush=True))
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(bench.lines(result)))
    return exit_codes.DONE if result.get("passed", True) else exit_codes.FAILED


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="M", help="name, folder or GGUF file (default: the built-in model)"
    )


def _add_several(parser: argparse.ArgumentParser, options: Mapping[str, tuple[list[int], str]]) -> None:
    for name, (default, told) in options.items():
        shown = f"{told} (default {' '.join(map(str, default))})"
        parser.add_argument(name, type=int, nargs="+", default=default, metavar="N", help=shown)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_several(parser, {"--threads": ([2], "numbers of threads")})
    add_path(parser, "--vllm", "PYTHON", "also serve with vLLM on the CPU, of this Python's environment")
    add_path(parser, "--llama-cpp", "SERVER", "also serve with this llama-server of llama.cpp")


def _bench_engine(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.engine import EngineWorkload, bench_engine

    workload = EngineWorkload(new_tokens=arguments.new_tokens, repetitions=arguments.repetitions)
    model = app.load_model(arguments.model)
    servers: dict[str, dict[str, float]] = {}
    if arguments.vllm is not None or arguments.llama_cpp is not None:
        from rollfeed.benchmarks.engine_servers import bench_servers

        servers = bench_servers(
            model,
            gguf_file=gguf_file_of(arguments.model),
            vllm_python=arguments.vllm,
            llama_server=arguments.llama_cpp,
            threads=max(arguments.threads),
            workload=workload,
            progress=progress,
        )
    result = bench_engine(model, threads=arguments.threads, workload=workload, progress=progress)
    return {**result, "servers": servers}


def _bench_rewards(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.rewards import JudgeWorkload, RewardWorkload, bench_judge, bench_rewards

    if arguments.judge:
        return bench_judge(JudgeWorkload(repetitions=arguments.repetitions), progress=progress)
    workload = RewardWorkload(num_inputs=arguments.inputs, repetitions=arguments.repetitions, seed=arguments.seed)
    return bench_rewards(workload, progress=progress)


def _add_client_options(parser: argparse.ArgumentParser) -> None:
    sizes = {"--tokens": ([1000, 8000], "of a response"), "--in-flight": ([128, 512, 2048], "requests at once")}
    _add_several(parser, sizes)
    add_path(parser, "--slime", "PATH", "a checkout of slime, whose own rollout is measured too")
    parser.add_argument(
        "--compat", action="store_true", help="with --slime: measure rollfeed.compat.slime_rollout in its place, too"
    )
    needs = "has what slime imports, httpx, msgspec and numpy, and for --compat rollfeed (default: this one)"
    add_path(parser, "--slime-python", "PYTHON", f"of an environment that {needs}")


def _bench_client(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.client import ClientWorkload, SlimeCheckout, bench_client

    folder, python = arguments.slime, arguments.slime_python
    if folder is None and python is not None:
        raise ConfigError(f"--slime-python {python}: there is no checkout to run with it; give --slime")
    if folder is None and arguments.compat:
        raise ConfigError("--compat: there is no checkout whose samples could be filled; give --slime")
    if min(*arguments.tokens, *arguments.in_flight) < 1:
        raise ConfigError("--tokens and --in-flight must be at least 1")
    return bench_client(
        tokens=arguments.tokens,
        in_flight=arguments.in_flight,
        workload=ClientWorkload(repetitions=arguments.repetitions, seed=arguments.seed),
        progress=progress,
        slime=None
        if folder is None
        else SlimeCheckout(folder=folder, python=python or Path(sys.executable), compat=arguments.compat),
    )


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    modes = ["sync", "oversample", "partial", "async"]
    parser.add_argument("--mode", required=True, choices=modes, help="how batches come about")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="batches (default 5 in sync and oversample, 64 in partial and async)"
    )
    add_flags(parser, full="responses ten times as long: the published size")
    parser.add_argument(
        "--weight-updates",
        action=argparse.BooleanOptionalAction,
        help="publish a version after every batch (default: in partial and async)",
    )


def _bench_schedule(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.schedule import DEFAULT_STEPS, bench_schedule
    from rollfeed.benchmarks.schedule_workload import ScheduleMode, ScheduleWorkload

    mode = ScheduleMode(arguments.mode)
    num_steps = DEFAULT_STEPS[mode] if arguments.steps is None else arguments.steps
    if num_steps < 1:
        raise ConfigError("--steps must be at least 1")
    if not arguments.filtered < 1.0:
        raise ConfigError(f"--filtered {arguments.filtered}: give a share of at least 0 and below 1")
    keeps_work = mode in (ScheduleMode.PARTIAL, ScheduleMode.ASYNC)
    make = ScheduleWorkload.published if arguments.full else ScheduleWorkload
    workload = make(
        mode=mode,
        num_steps=num_steps,
        num_engines=arguments.engines,
        num_slots=arguments.slots,
        filtered_share=arguments.filtered,
        max_staleness=arguments.max_staleness,
        weight_updates=keeps_work if arguments.weight_updates is None else arguments.weight_updates,
        seed=arguments.seed,
    )
    return bench_schedule(workload, progress=progress)


def _bench_placement(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.schedule import PlacementWorkload, bench_placement

    return bench_placement(PlacementWorkload(seed=arguments.seed), progress=progress)


def _add_chaos_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=["sync", "partial", "async"], default="sync", help="rollout.mode of the run")
    add_flags(
        parser,
        deterministic="the order of the prompts must be that of the unbroken run",
        agents="episodes with a tool that leaves traces, killed in their middle: nothing may be done twice",
        environments="problems of environments whose difficulty adapts; levels must be those of the unbroken run",
    )
    add_path(parser, "--keep", "DIR", "an empty folder, to keep both runs in")


def _bench_chaos(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.chaos import Chaos, bench_chaos

    chaos = Chaos(
        num_kills=arguments.kills,
        mode=arguments.mode,
        deterministic=arguments.deterministic,
        agents=arguments.agents,
        environments=arguments.environments,
        seed=arguments.seed,
    )
    return bench_chaos(chaos, keep=arguments.keep, progress=progress)


def _bench_agents(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.agents import AgentsWorkload, TurnsWorkload, bench_agents
    from rollfeed.benchmarks.schedule_workload import ScheduleMode

    tokenizer = app.load_model(arguments.model, with_weights=False).tokenizer
    turns = TurnsWorkload(context_tokens=arguments.context, repetitions=arguments.repetitions, seed=arguments.seed)
    agents = AgentsWorkload(mode=ScheduleMode.ASYNC, num_steps=arguments.steps, seed=arguments.seed)
    return bench_agents(turns, agents, tokenizer, progress=progress)


def _bench_gateway(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.gateway.gateway_bench import GatewayWorkload, bench_gateway

    workload = GatewayWorkload(
        context_tokens=arguments.context,
        num_sessions=arguments.sessions,
        repetitions=arguments.repetitions,
        seed=arguments.seed,
    )
    return bench_gateway(workload, app.load_model(arguments.model, with_weights=False), progress=progress)


def _add_environments_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespaces", nargs="+", default=["core", "rlve"], metavar="N", help="(default: core rlve)")
    _add_several(parser, {"--levels": ([0, 4], "to measure")})


def _bench_environments(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from rollfeed.benchmarks.environments.making_rates import MakingWorkload, bench_environments

    workload = MakingWorkload(
        namespaces=tuple(arguments.namespaces),
        levels=tuple(arguments.levels),
        seconds=arguments.seconds,
        draws=arguments.draws,
    )
    return bench_environments(workload, progress=progress)


def _bench_train(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    try:
        # Here, because it brings torch, which the command line does without.
        from rollfeed.benchmarks.train import TrainWorkload, bench_train
    except ModuleNotFoundError as error:
        remedy = "which is not installed: pip install 'rollfeed[local]'"
        raise ConfigError(f"training needs {error.name}, {remedy}") from None
    workload = TrainWorkload(num_steps=arguments.steps, threads=arguments.threads, seed=arguments.seed)
    return bench_train(app.load_model(arguments.model), workload=workload, progress=progress)


_REPETITIONS = (3, "of each measurement", 1)
_BENCHES = {
    "engine": _Bench(
        _bench_engine,
        bench_lines.engine,
        help="the embedded engine beside transformers' generate()",
        description="Decode the same prompts with the embedded engine and transformers in turn. Takes minutes.",
        example="--threads 1 2 --json > bench/engine.json",
        numbers={"--new-tokens": (128, "tokens of a response", 1), "--repetitions": _REPETITIONS},
        add_others=_add_engine_options,
    ),
    "rewards": _Bench(
        _bench_rewards,
        bench_lines.rewards,
        help="the reward hub beside math-verify",
        description="Grade the same answers with the reward hub and with math-verify in one process, in turn.",
        example="--json > bench/rewards.json",
        numbers={"--inputs": (1000, "responses", 1), "--repetitions": _REPETITIONS, "--seed": (0, "of the inputs", 0)},
        add_others=lambda parser: add_flags(parser, judge="instead, have 256 answers judged at once, each in 0.25 s"),
    ),
    "client": _Bench(
        _bench_client,
        bench_lines.client,
        help="the SGLang client under a whole run beside a client as slime has it",
        description="Make rollouts on a fake server that takes no time, with ours, with httpx, json and lists, and "
        "with a checkout of slime where one is given, in turn. Takes half an hour for everything.",
        example="--tokens 8000 --in-flight 512 --slime ~/slime --json",
        numbers={"--repetitions": _REPETITIONS, "--seed": (0, "of prompts and sampling", 0)},
        add_others=_add_client_options,
    ),
    "schedule": _Bench(
        _bench_schedule,
        bench_lines.schedule,
        help="the scheduler beside what its engines could do at most",
        description="Make batches from fake engines that take the time of real ones, and compare with all slots full "
        "all the time. Takes two minutes in the modes sync and oversample, five in partial and async; with --full ten "
        "times as long.",
        example="--mode async --filtered 0.5 --json",
        numbers={
            "--filtered": (0.0, "share of groups that a filter drops", 0),
            "--engines": (4, "fake engines", 1),
            "--slots": (64, "requests an engine decodes", 1),
            "--max-staleness": (
                32,
                "of rollout.max_staleness, in async (default 32: without training time, long responses last many "
                "batches)",
                0,
            ),
            "--seed": (0, "of prompts and lengths", 0),
        },
        add_others=_add_schedule_options,
    ),
    "placement": _Bench(
        _bench_placement,
        bench_lines.placement,
        help="step-synchronous runs with and without [placement]",
        description="Make the same batches with no placement, long answers first, and rounds of long answers. "
        "Takes five minutes.",
        example="--json > bench/placement.json",
        numbers={"--seed": (0, "of lengths", 0)},
    ),
    "chaos": _Bench(
        _bench_chaos,
        bench_lines.chaos,
        help="a run that is killed again and again beside one that is not",
        description="Kill a run, also inside its commits, its engines and its reward workers at random instants, "
        "resume it, and count from its files what was lost, doubled or reordered; the exit code is 1 when something "
        "was. Ten kills take one to two minutes.",
        example="--kills 30 --mode partial --deterministic --json",
        numbers={"--kills": (10, "kills of all kinds together", 1), "--seed": (0, "of the run and of the kills", 0)},
        add_others=_add_chaos_options,
    ),
    "agents": _Bench(
        _bench_agents,
        bench_lines.agents,
        help="turns beside rendering the conversation again, and engines while tools take their time",
        description="Take 8 to 128 turns in conversations that end at the same number of tokens, and measure the CPU "
        "time of each beside rendering and tokenising all of it again; then make batches from fake engines in async "
        "mode, with tools between the turns that take a time of heavy tail, and compare with all slots full all the "
        "time. Takes six minutes.",
        example="--json > bench/agents.json",
        numbers={
            "--repetitions": _REPETITIONS,
            "--context": (8192, "tokens of a conversation at its end", 1024),
            "--steps": (32, "batches with tools; 0: turns only", 0),
            "--seed": (0, "of texts, lengths and waits", 0),
        },
        add_others=_add_model,
    ),
    "gateway": _Bench(
        _bench_gateway,
        bench_lines.gateway,
        help="turns of agents beside a server that echoes what they send",
        description="Hold conversations of 10 turns with a tool, streamed, in each API that the gateway speaks; agents "
        "and a fake engine are other processes. Measure the processor time of the gateway's process, beside that of a "
        "server that echoes the same bodies; the exit code is 1 when the samples are not what the engine sampled. "
        "Takes two minutes.",
        example="--json > bench/gateway.json",
        numbers={
            "--repetitions": (5, "of each measurement", 1),
            "--context": (8192, "tokens of a conversation at its end", 2048),
            "--sessions": (16, "of each API, in each repetition", 1),
            "--seed": (0, "of what is sampled", 0),
        },
        add_others=_add_model,
    ),
    "environments": _Bench(
        _bench_environments,
        bench_lines.environments,
        help="problems a second that workers make and verify",
        description="Make and verify problems of each environment in workers, and draw from a mixture in which one "
        "generator hangs. Takes a minute for the built-in ones, a quarter of an hour with RLVE-Gym's.",
        example="--json > bench/environments.json",
        numbers={"--seconds": (1.0, "for each level", 0.01), "--draws": (2000, "from the mixture", 100)},
        add_others=_add_environments_options,
    ),
    "fleet": _Bench(bench_fleet.measure, bench_fleet.lines, *bench_fleet.TOLD, bench_fleet.NUMBERS),
    "train": _Bench(
        _bench_train,
        bench_lines.train,
        help="steps of training beside what their matrix products take",
        description="Train on a few batches with the embedded engine, in one process on the CPU, and measure "
        "generation, scoring, training and publishing; the passes are compared with plain matrix products of the same "
        "shapes. Takes a minute or two with the built-in model.",
        example="--steps 5 --threads 2 --json",
        numbers={
            "--steps": (3, "measured, after one that is not", 1),
            "--threads": (2, "of engine and trainer", 1),
            "--seed": (0, "of prompts and sampling", 0),
        },
        add_others=_add_model,
    ),
}
