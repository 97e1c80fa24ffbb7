"""``rollfeed eval``: measure a policy on the sets of a settings file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rollfeed import app
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import add_settings_arguments, path_argument, spec_of
from rollfeed.cli.evaluating.progress import EvalReporter, share_with_interval
from rollfeed.evaluation import EvalResult, Interval, SetResult
from rollfeed.protocols import Engine, Isolation

_EPILOG = """the sets are the tables [[eval.datasets]] and [[eval.environments]] of FILE; what neither they nor [eval]
say is as in training. DIR then has eval.json with the numbers and answers.parquet with every answer.

example: rollfeed eval examples/reverse/train.toml --set model.checkpoint=runs/reverse/model --out runs/eval
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "eval",
        help="measure a model on held-out prompts",
        description="Answer the prompts of all evaluation sets, score the answers, and give accuracy with its 95 % "
        "interval, pass@k, pass^k, rewards and lengths.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_settings_arguments(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=path_argument, help="for results (default: runs/<file>-eval-<date>-<time>)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the results that are in --out")
    parser.add_argument("--quiet", action="store_true", help="no progress, only errors and the result")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, store, and say what was found.

    Raises:
        ConfigError: If anything is wrong that can be known beforehand; nothing has been started.
        RollfeedError: If the engine or too many gradings fail.
    """
    spec = spec_of(arguments)
    settings = spec.settings
    model = app.load_settings_model(settings)
    prepared = app.prepare_run_evaluation(spec, model)
    engine = app.build_engine(model, settings.engine, deterministic=settings.rollout.deterministic)
    out = arguments.out or default_directory(arguments.file)
    app.check_eval_output(out, overwrite=arguments.overwrite)
    with EvalReporter(quiet=arguments.quiet) as reporter:
        result = asyncio.run(exit_codes.until_signal(_measure(prepared, engine, reporter)))
    about = {"settings": str(arguments.file), "overrides": arguments.overrides, "model": settings.model.checkpoint}
    app.write_evaluation(result, out, about=about)
    if arguments.json:
        print(json.dumps({"out": str(out), **about, **result.summary()}, ensure_ascii=False))
    else:
        print("\n".join(lines_of(result)))
        print(f"{result.num_tokens} tokens in {result.seconds:.1f} s; results are in {out}")
    return exit_codes.DONE if any(each.num_prompts for each in result.sets) else exit_codes.FAILED


def default_directory(file: Path) -> Path:
    """Return a new directory below ``runs``, named after the settings file and the time."""
    return Path("runs") / f"{file.stem}-eval-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


async def _measure(prepared: app.PreparedEvaluation, engine: Engine, reporter: EvalReporter) -> EvalResult:
    def tell(isolation: Isolation) -> None:
        print(isolation, file=sys.stderr)

    async with engine:
        return await app.evaluate(prepared, engine=engine, on_progress=reporter, on_isolation=tell)


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
