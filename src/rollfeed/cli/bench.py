"""``rollfeed bench``: measure this machine, ours and a reference in turn."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rollfeed import app
from rollfeed.benchmarks.engine import Workload, bench_engine
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import path_argument
from rollfeed.cli.benching import train
from rollfeed.cli.benching.machine import machine
from rollfeed.engine import DEFAULT_MODEL, gguf_file_of
from rollfeed.errors import ConfigError


def register(commands: Any) -> None:
    """Add the command and its subcommands to the parser."""
    parser = commands.add_parser("bench", help="measure speed as ratios to a reference, in one run")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    engine = actions.add_parser(
        "engine",
        help="the embedded engine beside transformers' generate()",
        description="Decode the same prompts with the embedded engine and transformers in turn. Takes minutes.",
        epilog="example: rollfeed bench engine --threads 1 2 --json > bench/engine.json",
    )
    engine.add_argument(
        "--threads", type=int, nargs="+", default=[2], metavar="N", help="numbers of threads (default 2)"
    )
    engine.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="M", help="name, folder or GGUF file (default: the built-in model)"
    )
    engine.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens of a response (default 128)")
    engine.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each measurement (default 3)")
    engine.add_argument(
        "--vllm",
        type=path_argument,
        metavar="PYTHON",
        help="also serve with vLLM on the CPU, of this Python's environment",
    )
    engine.add_argument(
        "--llama-cpp", type=path_argument, metavar="SERVER", help="also serve with this llama-server of llama.cpp"
    )
    engine.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    engine.set_defaults(run=run_engine)
    _register_rewards(actions)
    _register_client(actions)
    _register_schedule(actions)
    _register_placement(actions)
    _register_chaos(actions)
    train.register(actions)


def _register_rewards(actions: Any) -> None:
    rewards = actions.add_parser(
        "rewards",
        help="the reward hub beside math-verify",
        description="Grade the same answers with the reward hub and with math-verify in one process, in turn.",
        epilog="example: rollfeed bench rewards --json > bench/rewards.json",
    )
    rewards.add_argument("--inputs", type=int, default=1_000, metavar="N", help="responses (default 1000)")
    rewards.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each measurement (default 3)")
    rewards.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs (default 0)")
    rewards.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    rewards.set_defaults(run=run_rewards)


def _register_client(actions: Any) -> None:
    client = actions.add_parser(
        "client",
        help="the SGLang client under a whole run beside a client as slime has it",
        description="Make rollouts on a fake server that takes no time, with ours, with httpx, json and lists, and "
        "with a checkout of slime where one is given, in turn. Takes half an hour for everything.",
        epilog="example: rollfeed bench client --tokens 8000 --in-flight 512 --slime ~/slime --json",
    )
    client.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", default=[1000, 8000], help="of a response (default 1000 8000)"
    )
    client.add_argument(
        "--in-flight",
        type=int,
        nargs="+",
        metavar="N",
        default=[128, 512, 2048],
        help="requests at once (default 128 512 2048)",
    )
    client.add_argument(
        "--slime", type=path_argument, metavar="PATH", help="a checkout of slime, whose own rollout is measured too"
    )
    client.add_argument(
        "--slime-python",
        type=path_argument,
        metavar="PYTHON",
        help="of an environment that has what slime imports, httpx, msgspec and numpy (default: this one)",
    )
    client.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each measurement (default 3)")
    client.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and sampling (default 0)")
    client.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    client.set_defaults(run=run_client)


def _register_schedule(actions: Any) -> None:
    schedule = actions.add_parser(
        "schedule",
        help="the scheduler beside what its engines could do at most",
        description="Make batches from fake engines that take the time of real ones, and compare with all slots full "
        "all the time. Takes two minutes in the modes sync and oversample, five in partial and async; with --full ten "
        "times as long.",
        epilog="example: rollfeed bench schedule --mode async --filtered 0.5 --json",
    )
    schedule.add_argument(
        "--mode", required=True, choices=["sync", "oversample", "partial", "async"], help="how batches come about"
    )
    schedule.add_argument(
        "--filtered", type=float, default=0.0, metavar="P", help="share of groups that a filter drops (default 0)"
    )
    schedule.add_argument("--engines", type=int, default=4, metavar="N", help="fake engines (default 4)")
    schedule.add_argument("--slots", type=int, default=64, metavar="N", help="requests an engine decodes (default 64)")
    schedule.add_argument(
        "--steps", type=int, metavar="N", help="batches (default 5 in sync and oversample, 64 in partial and async)"
    )
    schedule.add_argument("--full", action="store_true", help="responses ten times as long: the published size")
    schedule.add_argument(
        "--weight-updates",
        action=argparse.BooleanOptionalAction,
        help="publish a version after every batch (default: in partial and async)",
    )
    schedule.add_argument(
        "--max-staleness",
        type=int,
        default=32,
        metavar="N",
        help="of rollout.max_staleness, in async (default 32: without training time, long responses last many batches)",
    )
    schedule.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and lengths (default 0)")
    schedule.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    schedule.set_defaults(run=run_schedule)


def _register_placement(actions: Any) -> None:
    placement = actions.add_parser(
        "placement",
        help="step-synchronous runs with and without [placement]",
        description="Make the same batches with no placement, long answers first, and rounds of long answers. "
        "Takes five minutes.",
        epilog="example: rollfeed bench placement --json > bench/placement.json",
    )
    placement.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths (default 0)")
    placement.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    placement.set_defaults(run=run_placement)


def _register_chaos(actions: Any) -> None:
    chaos = actions.add_parser(
        "chaos",
        help="a run that is killed again and again beside one that is not",
        description="Kill a run, also inside its commits, its engines and its reward workers at random instants, "
        "resume it, and count from its files what was lost, doubled or reordered; the exit code is 1 when something "
        "was. Ten kills take one to two minutes.",
        epilog="example: rollfeed bench chaos --kills 30 --mode partial --deterministic --json",
    )
    chaos.add_argument("--kills", type=int, default=10, metavar="N", help="kills of all kinds together (default 10)")
    chaos.add_argument("--mode", choices=["sync", "partial", "async"], default="sync", help="rollout.mode of the run")
    chaos.add_argument(
        "--deterministic", action="store_true", help="the order of the prompts must be that of the unbroken run"
    )
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="of the run and of the kills (default 0)")
    chaos.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    chaos.add_argument("--keep", type=path_argument, metavar="DIR", help="an empty folder, to keep both runs in")
    chaos.set_defaults(run=run_chaos)


def run_engine(arguments: argparse.Namespace) -> int:
    """Measure the embedded engine.

    Raises:
        ConfigError: If a server to compare with cannot be started.
    """
    workload = Workload(new_tokens=arguments.new_tokens, repetitions=arguments.repetitions)
    model = app.load_model(arguments.model)

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

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
    result |= {"servers": servers}
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    for row in result["by_threads"]:
        for precision, figures in row["by_precision"].items():
            print(
                f"{row['threads']} threads, {precision}: {figures['ratio']:.2f} times as fast as generate() "
                f"({figures['tokens_per_second']:.0f} tokens/s), "
                f"logprobs within {figures['max_logprob_difference']:.1e}, "
                f"KL {figures['kl']:.4f} a token, "
                f"greedy outputs {'identical' if figures['greedy_outputs_identical'] else 'DIFFERENT'}"
            )
    for size, rates in servers.items():
        told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        print(f"tokens/s over HTTP, {size} at once: {told}")
    return 0


def run_rewards(arguments: argparse.Namespace) -> int:
    """Measure the reward hub.

    Raises:
        ConfigError: If an option is wrong, or the reference is not installed.
    """
    from rollfeed.benchmarks.rewards import Workload as RewardWorkload
    from rollfeed.benchmarks.rewards import bench_rewards

    if arguments.inputs < 1 or arguments.repetitions < 1:
        raise ConfigError("--inputs and --repetitions must be at least 1")
    workload = RewardWorkload(num_inputs=arguments.inputs, repetitions=arguments.repetitions, seed=arguments.seed)
    result = bench_rewards(workload, progress=lambda line: print(line, file=sys.stderr, flush=True))
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{result['hub_ratio']:.1f} times {result['cores']} cores of math-verify "
        f"({result['math_verify_verdicts_per_second']:.0f} verdicts/s in one process)"
    )
    for row in result["by_hanging_share"]:
        print(
            f"hub, {row['hanging_share']:.0%} hanging: {row['verdicts_per_second']:.0f} verdicts/s, "
            f"{row['lost_seconds']:.1f} s lost of {row['deadlines_seconds']:.1f} s of deadlines"
        )
    return 0


def run_client(arguments: argparse.Namespace) -> int:
    """Measure the SGLang client.

    Raises:
        ConfigError: If an option is wrong, the reference is not installed, or the checkout is none of slime.
    """
    from rollfeed.benchmarks.client import ClientWorkload, SlimeCheckout, bench_client

    if arguments.slime is None and arguments.slime_python is not None:
        raise ConfigError(f"--slime-python {arguments.slime_python}: there is no checkout to run with it; give --slime")
    if min(*arguments.tokens, *arguments.in_flight, arguments.repetitions) < 1:
        raise ConfigError("--tokens, --in-flight and --repetitions must be at least 1")
    result = bench_client(
        tokens=arguments.tokens,
        in_flight=arguments.in_flight,
        workload=ClientWorkload(repetitions=arguments.repetitions, seed=arguments.seed),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        slime=None
        if arguments.slime is None
        else SlimeCheckout(folder=arguments.slime, python=arguments.slime_python or Path(sys.executable)),
    )
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    for cell in result.get("cells", [result]):
        if cell["slime_ratio"] is not None:
            print(
                f"{cell['tokens']} tokens, {cell['in_flight']} in flight: {cell['slime_ratio']:.1f} times below slime, "
                f"whose stand-in takes {cell['reference_over_slime']:.2f} times what it takes"
            )
        print(
            f"{cell['tokens']} tokens, {cell['in_flight']} in flight: {cell['ratio']:.1f} times below httpx, "
            f"{cell['cpu_seconds_per_million_tokens']:.2f} CPU seconds per million tokens, "
            f"{cell['bytes_per_token']:.1f} bytes a token, "
            f"{cell['peak_memory_mb']:.0f} MB of memory (httpx {cell['reference_peak_memory_mb']:.0f} MB)"
        )
    return 0


def run_schedule(arguments: argparse.Namespace) -> int:
    """Measure the scheduler.

    Raises:
        ConfigError: If an option is wrong.
    """
    from rollfeed.benchmarks.schedule import DEFAULT_STEPS, bench_schedule
    from rollfeed.benchmarks.schedule_workload import ScheduleMode, ScheduleWorkload

    mode = ScheduleMode(arguments.mode)
    num_steps = DEFAULT_STEPS[mode] if arguments.steps is None else arguments.steps
    if min(arguments.engines, arguments.slots, num_steps) < 1 or min(arguments.seed, arguments.max_staleness) < 0:
        raise ConfigError("--engines, --slots and --steps must be at least 1, --seed and --max-staleness at least 0")
    if not 0.0 <= arguments.filtered < 1.0:
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
    result = bench_schedule(workload, progress=lambda line: print(line, file=sys.stderr, flush=True))
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    reasons = ", ".join(f"{reason} {share:.1%}" for reason, share in result["wasted_by_reason"].items())
    versions = result["versions"]
    print(
        f"{mode.value}: {result['efficiency']:.3f} of the bound of {result['bound_tokens_per_second']:.0f} tokens/s"
        f" ({result['efficiency_of_possible']:.3f} of what the filter leaves), slots idle {result['idle']:.1%}"
    )
    print(f"wasted {result['wasted_fraction']:.1%} of the tokens ({reasons or 'nothing'})")
    print(
        f"mean length {result['mean_length_trained']:.1f} trained, {result['mean_length_drawn']:.1f} drawn:"
        f" bias {result['length_bias']:+.2%}"
    )
    print(
        f"{versions['updates']:.0f} weight updates, {versions['spanning_share']:.1%} of the samples span versions,"
        f" staleness {versions['staleness_mean']:.2f} on average, {versions['staleness_max']:.0f} at most"
    )
    return 0


def run_placement(arguments: argparse.Namespace) -> int:
    """Measure what the order of prompts is worth."""
    from rollfeed.benchmarks.placement import PlacementWorkload, bench_placement

    workload = PlacementWorkload(seed=arguments.seed)
    result = bench_placement(workload, progress=lambda line: print(line, file=sys.stderr, flush=True))
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    for name, speedup in result["speedup"].items():
        print(f"{name}: {result[name]['efficiency']:.3f} of the bound, {speedup:.2f} times as fast as without")
    return 0


def run_chaos(arguments: argparse.Namespace) -> int:
    """Break a run and count what is left.

    Raises:
        ConfigError: If an option is wrong.
        RollfeedError: If a run cannot be made at all.
    """
    from rollfeed.benchmarks.chaos import Chaos, bench_chaos

    chaos = Chaos(
        num_kills=arguments.kills,
        mode=arguments.mode,
        deterministic=arguments.deterministic,
        seed=arguments.seed,
    )
    result = bench_chaos(chaos, keep=arguments.keep, progress=lambda line: print(line, file=sys.stderr, flush=True))
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    code = exit_codes.DONE if result["passed"] else exit_codes.FAILED
    if arguments.json:
        print(json.dumps(result, indent=2))
        return code
    kills = ", ".join(f"{number} {kind}" for kind, number in result["kills"].items())
    print(f"{result['lost']} lost, {result['duplicated']} duplicated, {result['reordered']} reordered")
    print(
        f"{result['trained']} prompts trained and {result['dropped']} dropped in {result['steps']} steps; "
        f"kills: {kills}; {result['commits_hit']} inside a commit; {result['seconds']:.0f} s"
    )
    for problem in [*result["problems"], *filter(None, [result["error"]])]:
        print(problem)
    return code
