"""``rollfeed env``: the environments, problems of them, and how hard their levels are for a model."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from rollfeed import app
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_actions, add_command, add_flags, add_numbers, first_problem
from rollfeed.cli.env_check import register_check
from rollfeed.cli.eval import progress_line, share_with_interval
from rollfeed.cli.progress import StatusLine
from rollfeed.config import EngineSettings, SamplingSettings
from rollfeed.engine import DEFAULT_MODEL
from rollfeed.environments import EnvironmentRegistry, make_task
from rollfeed.errors import ConfigError
from rollfeed.evaluation import Calibration
from rollfeed.protocols import Environment

_DEFAULT_LEVELS = 6
_CALIBRATE = """each problem is answered once, sampled as in training with sampling.rollout_skip_special_tokens = true;
problems are of a split of their own. Recommended is the lowest level of which 5 to 60 % are solved.

example: rollfeed env calibrate core/compare_max --levels 0 2 4 --samples 200
"""


def register(commands: Parsers) -> None:
    """Add the command and its actions to the parser."""
    actions = add_actions(commands, "env", help="list environments, show a problem of one, or measure its levels")
    listing = add_command(
        actions, "list", run_list, help="list all environments", epilog="example: rollfeed env list --json"
    )
    add_flags(listing, json="one JSON list")
    sample = add_command(
        actions,
        "sample",
        run_sample,
        help="show one problem, with its answer",
        epilog="example: rollfeed env sample core/add_numbers --level 2 --seed 7",
    )
    sample.add_argument("id", metavar="ID", help="environment, for example core/copy_text")
    numbers = {"--level": (0, "difficulty"), "--seed": (0, "run seed"), "--index": (0, "number of the problem")}
    add_numbers(sample, numbers)
    add_flags(sample, json="one JSON object")
    register_check(actions)
    _register_calibrate(actions)


def _register_calibrate(actions: Parsers) -> None:
    parser = add_command(
        actions,
        "calibrate",
        run_calibrate,
        help="measure how hard the levels of an environment are for a model",
        description="Give the accuracy of a model by level, with 95 % intervals, and the level to start training at.",
        epilog=_CALIBRATE,
    )
    parser.add_argument("id", metavar="ID", help="environment, for example core/compare_max")
    parser.add_argument("--levels", metavar="L", type=int, nargs="+", help="levels to measure (default: the first six)")
    parser.add_argument(
        "--model", metavar="M", default=DEFAULT_MODEL, help="name, folder or GGUF file (default: the built-in model)"
    )
    add_numbers(
        parser,
        {
            "--samples": (64, "problems of a level"),
            "--temperature": (1.0, "of sampling"),
            "--max-response-len": (64, "tokens"),
            "--seed": (0, "of problems and answers"),
        },
    )
    parser.add_argument(
        "--parameter",
        dest="parameters",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="parameter of the environment, for example alphabet_size=10; may be given several times",
    )
    parser.add_argument("--threads", metavar="N", type=int, help="of the engine (default: as in a run)")
    add_flags(parser, no_chat_template="send the question as it is", quiet=True, json="one JSON object")


def run_list(arguments: argparse.Namespace) -> int:
    """Print the environments."""
    environments = _listed(EnvironmentRegistry())
    if arguments.json:
        print(json.dumps([_row(name, each) for name, each in environments.items()]))
        return 0
    width = max(map(len, environments))
    for name, each in environments.items():
        print(f"{name:{width}}  {each if isinstance(each, ConfigError) else each.summary}")
    return 0


def _listed(registry: EnvironmentRegistry) -> dict[str, Environment | ConfigError]:
    """Return all environments by id; of one that its package does not give, the error."""
    found: dict[str, Environment | ConfigError] = {}
    for environment_id in registry.ids():
        try:
            found[environment_id] = registry.get(environment_id)
        except ConfigError as error:
            found[environment_id] = error
    return found


def _row(name: str, found: Environment | ConfigError) -> dict[str, Any]:
    if isinstance(found, ConfigError):
        return {"id": name, "error": str(found)}
    return {"id": name, "version": found.version, "max_level": found.max_level, "summary": found.summary}


def run_sample(arguments: argparse.Namespace) -> int:
    """Print one problem. Raises ConfigError if there is no such environment or level."""
    environment = EnvironmentRegistry().get(arguments.id)
    task = make_task(environment, level=arguments.level, index=arguments.index, run_seed=arguments.seed)
    if arguments.json:
        record = {
            "id": task.environment,
            "version": task.version,
            "level": task.level,
            "seed": task.seed,
            "question": task.question,
            "params": task.params,
            "answer": task.answer,
        }
        print(json.dumps(record, ensure_ascii=False))
        return 0
    print(f"{task.environment} level {task.level} seed {task.seed}\n\n{task.question}\n")
    print(f"answer: {task.answer if task.answer is not None else 'any that passes the verifier'}")
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
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
    with StatusLine(progress_line, quiet=arguments.quiet) as progress:
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
            on_progress=progress,
        )
        calibration = asyncio.run(exit_codes.until_signal(measuring))
    if arguments.json:
        print(json.dumps(_record(arguments, parameters, calibration)))
    else:
        _print_calibration(arguments.id, calibration)
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
        raise ConfigError(f"--{key} {details['input']}: {first_problem(error)}") from None


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


def _print_calibration(environment_id: str, calibration: Calibration) -> None:
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
