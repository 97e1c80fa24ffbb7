"""The figures of ``rollfeed bench`` in sentences: a function an action."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def engine(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench engine`` has found."""
    for row in result["by_threads"]:
        for precision, figures in row["by_precision"].items():
            yield (
                f"{row['threads']} threads, {precision}: {figures['ratio']:.2f} times as fast as generate() "
                f"({figures['tokens_per_second']:.0f} tokens/s), "
                f"logprobs within {figures['max_logprob_difference']:.1e}, "
                f"KL {figures['kl']:.4f} a token, "
                f"greedy outputs {'identical' if figures['greedy_outputs_identical'] else 'DIFFERENT'}"
            )
    for size, rates in result["servers"].items():
        told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        yield f"tokens/s over HTTP, {size} at once: {told}"


def rewards(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench rewards`` has found."""
    if "most_calls_at_once" in result:
        calls = result["workload"]["num_calls"]
        yield (
            f"{calls} calls of {result['workload']['call_seconds']} s in {result['seconds']:.3f} s, "
            f"{result['most_calls_at_once']} at once (the requests alone {result['reference_seconds']:.3f} s)"
        )
        return
    yield (
        f"{result['hub_ratio']:.1f} times {result['cores']} cores of math-verify "
        f"({result['math_verify_verdicts_per_second']:.0f} verdicts/s in one process)"
    )
    for row in result["by_hanging_share"]:
        yield (
            f"hub, {row['hanging_share']:.0%} hanging: {row['verdicts_per_second']:.0f} verdicts/s, "
            f"{row['lost_seconds']:.1f} s lost of {row['deadlines_seconds']:.1f} s of deadlines"
        )


def client(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench client`` has found."""
    for cell in result.get("cells", [result]):
        if cell["compat_ratio"] is not None:
            yield (
                f"{cell['tokens']} tokens, {cell['in_flight']} in flight: in slime's place {cell['compat_ratio']:.1f} "
                f"times below slime, {cell['compat_cpu_seconds_per_million_tokens']:.2f} CPU seconds per million tokens"
            )
        if cell["slime_ratio"] is not None:
            yield (
                f"{cell['tokens']} tokens, {cell['in_flight']} in flight: {cell['slime_ratio']:.1f} times below slime, "
                f"whose stand-in takes {cell['reference_over_slime']:.2f} times what it takes"
            )
        yield (
            f"{cell['tokens']} tokens, {cell['in_flight']} in flight: {cell['ratio']:.1f} times below httpx, "
            f"{cell['cpu_seconds_per_million_tokens']:.2f} CPU seconds per million tokens, "
            f"{cell['bytes_per_token']:.1f} bytes a token, "
            f"{cell['peak_memory_mb']:.0f} MB of memory (httpx {cell['reference_peak_memory_mb']:.0f} MB)"
        )


def schedule(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench schedule`` has found."""
    reasons = ", ".join(f"{reason} {share:.1%}" for reason, share in result["wasted_by_reason"].items())
    versions = result["versions"]
    yield (
        f"{result['workload']['mode']}: {result['efficiency']:.3f} of the bound of "
        f"{result['bound_tokens_per_second']:.0f} tokens/s "
        f"({result['efficiency_of_possible']:.3f} of what the filter leaves), slots idle {result['idle']:.1%}"
    )
    yield f"wasted {result['wasted_fraction']:.1%} of the tokens ({reasons or 'nothing'})"
    yield (
        f"mean length {result['mean_length_trained']:.1f} trained, {result['mean_length_drawn']:.1f} drawn:"
        f" bias {result['length_bias']:+.2%}"
    )
    yield (
        f"{versions['updates']:.0f} weight updates, {versions['spanning_share']:.1%} of the samples span versions,"
        f" staleness {versions['staleness_mean']:.2f} on average, {versions['staleness_max']:.0f} at most"
    )


def placement(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench placement`` has found."""
    for name, speedup in result["speedup"].items():
        yield f"{name}: {result[name]['efficiency']:.3f} of the bound, {speedup:.2f} times as fast as without"


def chaos(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench chaos`` has found."""
    kills = ", ".join(f"{number} {kind}" for kind, number in result["kills"].items())
    effects = result["effects"]
    yield (
        f"{result['lost']} lost, {result['duplicated']} duplicated, {result['reordered']} reordered; "
        f"{effects['calls']} calls of the tool, {effects['repeated']} repeated, {effects['missing']} missing, "
        f"{effects['unsure']} begun by a killed process"
    )
    yield (
        f"{result['trained']} prompts trained and {result['dropped']} dropped in {result['steps']} steps; "
        f"kills: {kills}; {result['commits_hit']} inside a commit; {result['seconds']:.0f} s"
    )
    if "levels" in result:
        is_equal = "as" if result["levels_equal"] else "not as"
        told = ", ".join(f"{name} {level}" for name, level in result["levels"].items())
        yield f"levels {told}: {is_equal} in the unbroken run"
    yield from result["problems"]
    yield from filter(None, [result["error"]])


def train(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench train`` has found."""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in result["parts"].items())
    share = result["share_of_bound"]
    yield f"{result['step_seconds']:.1f} s a step ({parts})"
    yield (
        f"{result['output_tokens_per_second']:.0f} output tokens/s of step time, "
        f"{result['trained_tokens_per_second']:.0f} trained tokens/s of training time"
    )
    yield "nothing was trained on" if share is None else f"forward and backward at {share:.0%} of their matrix products"


def agents(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench agents`` has found."""
    for row in result["cpu"]["turns"]:
        yield (
            f"{row['num_turns']} turns, {row['context_tokens']} tokens: {row['turn_ms']:.2f} ms a turn, "
            f"{row['ratio']:.1f} times below rendering again ({row['reference_turn_ms']:.2f} ms); the last quarter "
            f"{row['last_quarter_over_first']:.2f} times the first ({row['reference_last_quarter_over_first']:.2f})"
        )
    if "schedule" in result:
        run = result["schedule"]
        yield (
            f"with tools of {result['mean_wait_seconds']:.2f} s on average: {run['efficiency']:.3f} of the bound of "
            f"{run['bound_tokens_per_second']:.0f} tokens/s, {run['groups_in_flight']} groups in flight, slots idle "
            f"{run['idle']:.1%}, wasted {run['wasted_fraction']:.1%}"
        )


def gateway(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench gateway`` has found."""
    by_api = ", ".join(f"{api} {cost:.2f}" for api, cost in result["cpu_milliseconds_per_turn_by_api"].items())
    yield (
        f"{result['cpu_milliseconds_per_turn']:.2f} ms of a processor a turn ({by_api}); a server that echoes takes "
        f"{result['echo_milliseconds_per_turn']:.2f} ms"
    )
    samples = result["samples"]
    yield (
        f"{samples['num_trained']} turns in {samples['num_samples']} samples: {len(samples['unsampled'])} not as "
        f"sampled, {len(samples['doubled'])} doubled, {len(samples['untrained'])} lost"
    )


def environments(result: dict[str, Any]) -> Iterator[str]:
    """Tell what ``bench environments`` has found."""
    for namespace, found in result.items():
        if isinstance(found, dict) and "tasks_per_message" in found:
            yield (
                f"{namespace}: {found['tasks_per_second_per_core']:.0f} tasks/s a core in the median, "
                f"{found['tasks_per_message']:.1f} to a message; {len(found['slow'])} slow, "
                f"{len(found['failed'])} with failures"
            )
    draws = result["draws_while_a_generator_hangs"]
    yield (
        f"{draws['draws']} draws beside a generator that hangs: {draws['p50_ms']:.2f} ms in the median, p99 "
        f"{draws['p99_ms']:.2f} ms, longest {draws['longest_ms']:.0f} ms; the event loop is at most "
        f"{draws['event_loop_late_ms']:.0f} ms late"
    )
