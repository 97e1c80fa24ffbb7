"""``rollfeed env calibrate``: how hard the levels of an environment are for a model."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from rollfeed import app
from rollfeed.cli import exit_codes
from rollfeed.cli.evaluating.progress import EvalReporter, share_with_interval
from rollfeed.config import EngineSettings, SamplingSettings
from rollfeed.engine import DEFAULT_MODEL
from rollfeed.environments import EnvironmentRegistry
from rollfeed.errors import ConfigError
from rollfeed.evaluation import Calibration

_DEFAULT_LEVELS = 6
_EPILOG = """each problem is answered once, sampled as in training with sampling.rollout_skip_special_tokens = true;
problems are of a split of their own. Recommended is the lowest level of which 5 to 60 % are solved.

example: rollfeed env calibrate core/compare_max --levels 0 2 4 --samples 200
"""


def register(actions: Any) -> None:
    """Add the action to those of ``env``."""
    parser = actions.add_parser(
        "calibrate",
        help="measure how hard the levels of an environment are for a model",
        description="Give the accuracy of a model by level, with 95 % intervals, and the level to start training at.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("id", metavar="ID", help="environment, for example core/compare_max")
    parser.add_argument("--levels", metavar="L", type=int, nargs="+", help="levels to measure (default: the first six)")
    parser.add_argument("--samples", metavar="N", type=int, default=64, help="problems of a level (default 64)")
    parser.add_argument(
        "--model", metavar="M", default=DEFAULT_MODEL, help="name, folder or GGUF file (default: the built-in model)"
    )
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="of sampling (default 1)")
    parser.add_argument("--max-response-len", metavar="N", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of problems and answers (default 0)")
    parser.add_argument(
        "--parameter",
        dest="parameters",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="parameter of the environment, for example alphabet_size=10; may be given several times",
    )
    parser.add_argument("--no-chat-template", action="store_true", help="send the question as it is")
    parser.add_argument("--threads", metavar="N", type=int, help="of the engine (default: as in a run)")
    parser.add_argument("--quiet", action="store_true", help="no progress, only errors and the result")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and recommend a level.

    Raises:
        ConfigError: If an option is wrong, or there is no such environment or level; nothing has been started.
        RollfeedError: If the engine fails.
    """
    levels = _levels(arguments)
    if not 1 <= arguments.samples <= 1_000_000:
        raise ConfigError(f"--samples {arguments.samples}: must be 1 to 1000000")
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed}: must be at least 0 and below 2**63")
    sampling = _section(
        SamplingSettings,
        rollout_temperature=arguments.temperature,
        rollout_max_response_len=arguments.max_response_len,
        # Else the token that ends a response is in its text, and verifiers that compare exactly refuse it.
        rollout_skip_special_tokens=True,
    )
    threads = {} if arguments.threads is None else {"threads": arguments.threads}
    engine_settings = _section(EngineSettings, **threads)
    parameters = _parameters(arguments.parameters)
    with EvalReporter(quiet=arguments.quiet) as reporter:
        measuring = app.calibrate_environment(
            arguments.id,
            model=app.load_model(arguments.model),
            levels=levels,
            num_samples=arguments.samples,
            sampling=sampling,
            seed=arguments.seed,
            parameters=parameters,
            apply_chat_template=not arguments.no_chat_template,
            engine_settings=engine_settings,
            on_progress=reporter,
        )
        calibration = asyncio.run(exit_codes.until_signal(measuring))
    if arguments.json:
        print(json.dumps(_record(arguments, parameters, calibration)))
    else:
        _print(arguments.id, calibration)
    return exit_codes.DONE


def _levels(arguments: argparse.Namespace) -> Sequence[int]:
    """Return the levels to measure, checked before a model is loaded for them."""
    hardest = EnvironmentRegistry().get(arguments.id).max_level
    last = _DEFAULT_LEVELS - 1 if hardest is None else min(hardest, _DEFAULT_LEVELS - 1)
    chosen = sorted(set(arguments.levels or range(last + 1)))
    wrong = [level for level in chosen if level < 0 or (hardest is not None and level > hardest)]
    if wrong:
        known = "0 and up" if hardest is None else f"0 to {hardest}"
        raise ConfigError(f"--levels {wrong[0]}: the levels of environment {arguments.id} are {known}")
    return chosen


def _section(section: type[Any], **values: Any) -> Any:
    try:
        return section(**values)
    except ValidationError as error:
        details = error.errors()[0]
        key = ".".join(map(str, details["loc"])).removeprefix("rollout_").replace("_", "-")
        raise ConfigError(f"--{key} {details['input']}: {details['msg'].removeprefix('Value error, ')}") from None


def _parameters(given: Sequence[str]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for entry in given:
        key, equals, text = entry.partition("=")
        if not equals or not key:
            raise ConfigError(f"--parameter {entry!r}: write it as key=value, for example alphabet_size=10")
        parameters[key] = _value(text)
    return parameters


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str | int | float | bool) else text


def _record(arguments: argparse.Namespace, parameters: dict[str, Any], calibration: Calibration) -> dict[str, Any]:
    return {
        "environment": arguments.id,
        "model": arguments.model,
        "parameters": parameters,
        "samples": arguments.samples,
        "temperature": arguments.temperature,
        "max_response_len": arguments.max_response_len,
        "seed": arguments.seed,
        "seconds": round(calibration.seconds, 3),
        "levels": [{"level": each.level, **each.found.summary()} for each in calibration.levels],
        "recommended": calibration.recommended,
    }


def _print(environment_id: str, calibration: Calibration) -> None:
    print("level  accuracy (95 % interval)   reward  answer found  truncated")
    for each in calibration.levels:
        found = each.found
        if found.accuracy is None:
            print(f"{each.level:5}  every problem failed: {found.first_failure}")
            continue
        accuracy = share_with_interval(found.accuracy, *found.accuracy_interval)
        print(
            f"{each.level:5}  {accuracy:25}  {found.reward_mean:7.3f}  {found.format_ok_ratio:12.1%}  "
            f"{found.truncated_ratio:9.1%}"
        )
    if calibration.recommended is None:
        print(
            f"no level of {environment_id} has an accuracy of 5 to 60 %: measure others, or choose another environment"
        )
    else:
        print(f"recommended: level {calibration.recommended}, the lowest with an accuracy of 5 to 60 %")
