"""``rollfeed eval``: measure a policy on the sets of a settings file."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollfeed import app
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import (
    Parsers,
    add_command,
    add_flags,
    add_path,
    add_settings_arguments,
    load_spec,
    path_argument,
)
from rollfeed.cli.progress import StatusLine
from rollfeed.cli.run import default_directory
from rollfeed.compat.convert.table import EVAL_FLAGS
from rollfeed.errors import ConfigError
from rollfeed.evaluation import EvalProgress, EvalResult, Interval, SetComparison, SetResult, compare
from rollfeed.logs import RUN_LOGS, run_log
from rollfeed.protocols import Engine, Isolation
from rollfeed.store.layout import PRINTED, TRACKERS
from rollfeed.types.text import counted

_EPILOG = """the sets are the tables [[eval.datasets]] and [[eval.environments]] of FILE; what neither they nor [eval]
say is as in training. DIR then has eval.json with the numbers and answers.parquet with every answer.

slime's file of sets (--eval-config) and its --eval-* flags set the same keys of [eval], after FILE and before --set.

--compare tells what changed between two evaluations of the same prompts, with a paired 95 % interval. RUN is the DIR of
an evaluation, or a run of rollfeed train, whose last evaluation counts.

examples:
  rollfeed eval examples/reverse/train.toml --set model.checkpoint=runs/reverse/model --out runs/eval
  rollfeed eval run.toml --eval-config eval.yaml --eval-temperature 0.6
  rollfeed eval --compare runs/eval-base runs/eval-tuned
"""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "eval",
        run,
        description="Answer the prompts of all evaluation sets, score the answers, and give accuracy with its 95 % "
        "interval, pass@k, pass^k, rewards and lengths.",
        epilog=_EPILOG,
    )
    add_settings_arguments(parser, needs_file=False)
    parser.add_argument("--compare", metavar="RUN", nargs=2, type=path_argument, help="compare two evaluations")
    for flag in EVAL_FLAGS:
        count: Any = {"nargs": "+"} if flag.takes == "texts" else {}
        told = f"slime's; {flag.becomes[0]}"
        parser.add_argument(f"--{flag.name}", dest=f"slime {flag.name}", metavar="X", help=told, **count)
    add_path(parser, "--out", "DIR", "for results (default: runs/<file>-eval-<date>-<time>)")
    overwrite = "replace the results that are in --out"
    add_flags(parser, overwrite=overwrite, quiet=True, json="the numbers as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Measure, store, and say what was found.

    Raises:
        ConfigError: If anything is wrong that can be known beforehand; nothing has been started.
        RollfeedError: If the engine or too many gradings fail.
    """
    if arguments.compare is not None:
        return _compare(arguments)
    if not arguments.files:
        raise ConfigError("rollfeed eval: give a settings file, or --compare and two runs")
    arguments.overrides = [*_slime_overrides(arguments), *arguments.overrides]
    spec = load_spec(arguments.files, arguments.overrides)
    settings = spec.settings
    model = app.load_settings_model(settings)
    prepared = app.prepare_run_evaluation(spec, model)
    trackers = app.load_trackers(settings, folders=spec.folders)
    engine = app.build_engine(
        model, settings.engine, deterministic=settings.rollout.deterministic, folders=spec.folders
    )
    out = arguments.out or default_directory(arguments.files, kind="-eval")
    app.check_eval_output(out, overwrite=arguments.overwrite)
    app.keep_server_logs(engine, out)
    for name in (PRINTED, *RUN_LOGS):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / TRACKERS, ignore_errors=True)
    about = {
        "settings": ", ".join(map(str, arguments.files)),
        "overrides": arguments.overrides,
        "model": settings.model.checkpoint,
    }

    async def measure(progress: StatusLine[EvalProgress]) -> EvalResult:
        async with app.tracked(trackers, out, settings):
            result = await _measure(prepared, engine, progress, out)
            app.write_evaluation(result, out, about=about)
            app.tell_of_evaluation(trackers, result)
        return result

    with run_log(out), StatusLine(progress_line, quiet=arguments.quiet) as progress:
        result = asyncio.run(exit_codes.until_signal(measure(progress)))
    if arguments.json:
        print(json.dumps({"out": str(out), **about, **result.summary()}, ensure_ascii=False))
    else:
        print("\n".join(lines_of(result)))
        print(f"{result.num_tokens} tokens in {result.seconds:.1f} s; results are in {out}")
    return exit_codes.DONE if any(each.num_prompts for each in result.sets) else exit_codes.FAILED


def _slime_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return what slime's flags say, as overrides."""
    from rollfeed.compat.convert.eval_flags import eval_overrides

    words: list[str] = []
    for flag in EVAL_FLAGS:
        given = getattr(arguments, f"slime {flag.name}")
        if given is not None:
            words += [f"--{flag.name}", *([given] if isinstance(given, str) else given)]
    overrides, left = eval_overrides(words)
    for what, reason in left:
        print(f"not carried over: {what}: {reason}", file=sys.stderr)
    return overrides


def _compare(arguments: argparse.Namespace) -> int:
    if arguments.files:
        raise ConfigError(
            f"rollfeed eval: --compare takes two runs and no settings file: leave {arguments.files[0]} out"
        )
    before, after = arguments.compare
    found = compare(app.read_outcomes(before), app.read_outcomes(after))
    if arguments.json:
        about = {"before": str(before), "after": str(after)}
        print(json.dumps({**about, "sets": {each.name: each.summary() for each in found}}, ensure_ascii=False))
    else:
        print("\n".join(line for each in found for line in _comparison_lines(each)))
    return exit_codes.DONE


def _comparison_lines(found: SetComparison) -> Iterator[str]:
    low, high = found.interval
    certain = "" if low > 0 or high < 0 else "; may be chance"
    yield f"{found.name}: {counted(found.num_prompts, 'prompt')} in both"
    yield f"  accuracy   {found.accuracy_before:.1%} -> {found.accuracy_after:.1%}"
    yield f"  change     {100 * found.change:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}){certain}"
    yield f"  prompts    {found.num_better} better, {found.num_worse} worse"
    if found.num_unpaired:
        yield f"  {found.num_unpaired} prompts are in one only, or failed in one, and are left out"


async def _measure(
    prepared: app.PreparedEvaluation, engine: Engine, progress: StatusLine[EvalProgress], out: Path
) -> EvalResult:
    def tell(isolation: Isolation) -> None:
        print(isolation, file=sys.stderr)

    async with engine:
        printed = out / PRINTED
        return await app.evaluate(prepared, engine=engine, on_progress=progress, on_isolation=tell, printed=printed)


def progress_line(progress: EvalProgress) -> str:
    """Return how far an evaluation is."""
    speed = progress.num_answered / max(progress.seconds, 1e-9)
    right = f"{progress.num_right / progress.num_scored:.1%} right so far" if progress.num_scored else "none scored yet"
    failed = f", {progress.num_failed} prompts failed" if progress.num_failed else ""
    return f"{progress.num_answered} of {progress.num_answers} answers, {right}{failed}, {speed:.1f} answers/s"


def share_with_interval(share: float | None, low: float, high: float) -> str:
    """Return an accuracy and its interval as people read them."""
    return "-" if share is None else f"{share:.1%} ({low:.1%} to {high:.1%})"


def lines_of(result: EvalResult) -> Iterator[str]:
    """Yield what people read of a result."""
    for each in result.sets:
        yield f"{each.name}: {each.num_prompts} prompts x {each.n_samples_per_prompt} answers"
        if each.num_failed:
            yield f"  {each.num_failed} prompts failed and are in no number, the first: {each.first_failure}"
        if each.num_over_length:
            yield f"  {each.num_over_length} prompts are too long and are left out"
        if each.num_repeats:
            yield f"  {each.num_repeats} prompts ask what an earlier one asks and are left out"
        if each.num_missing:
            yield f"  {each.num_missing} more were asked for: there are no more that differ"
        if each.num_prompts:
            yield from _number_lines(each)


def _number_lines(found: SetResult) -> Iterator[str]:
    yield f"  accuracy   {share_with_interval(found.accuracy, *found.accuracy_interval)}"
    yield f"  reward     {found.reward_mean:.4f}"
    if found.n_samples_per_prompt > 1:
        yield "  pass@k     " + _by_k(found.pass_at_k, found.pass_at_k_interval)
        yield "  pass^k     " + _by_k(found.pass_hat_k, found.pass_hat_k_interval)
    yield (
        f"  responses  {found.response_length_mean:.1f} tokens (median {found.response_length_median:g}, longest "
        f"{found.response_length_max}), {found.truncated_ratio:.1%} truncated"
    )


def _by_k(shares: Mapping[int, float], intervals: Mapping[int, Interval]) -> str:
    return ", ".join(f"{k}: {share_with_interval(value, *intervals[k])}" for k, value in shares.items())
