"""``rollfeed env``: the environments, problems of them, and how hard their levels are for a model."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from rollfeed import app
from rollfeed.app.environments.task_makers import ChosenEnvironment, MakingPlan, listed_environments, sample_tasks
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_actions, add_command, add_flags, add_numbers, first_problem
from rollfeed.cli.env_check import chosen_ids, register_check
from rollfeed.cli.env_plot import register_plot
from rollfeed.cli.eval import progress_line, share_with_interval
from rollfeed.cli.progress import StatusLine
from rollfeed.config import EngineSettings, SamplingSettings
from rollfeed.engine import DEFAULT_MODEL
from rollfeed.environments.making import EnvironmentFacts
from rollfeed.errors import ConfigError
from rollfeed.evaluation import Calibration
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import AnswerMarker, PromptPreprocessor

_DEFAULT_LEVELS = 6
_CALIBRATE = """each problem is answered once, sampled as in training with sampling.rollout_skip_special_tokens = true;
problems are of a split of their own. Recommended is the lowest level of which 5 to 60 % are solved.

A level is said to be cut short where answers that ended before --max-response-len are right more often.

examples:
  rollfeed env calibrate core/compare_max --levels 0 2 4 --samples 200
  rollfeed env calibrate 'core/*' --json
"""


def register(commands: Parsers) -> None:
    """Add the command and its actions to the parser."""
    actions = add_actions(commands, "env")
    listing = add_command(
        actions, "list", run_list, help="list all environments", epilog="example: rollfeed env list --json"
    )
    add_flags(listing, json="one JSON list")
    sample = add_command(
        actions,
        "sample",
        run_sample,
        help="show problems, with their answers",
        epilog="example: rollfeed env sample core/add_numbers --level 2 --count 3 --style TinyZero",
    )
    sample.add_argument("id", metavar="ID", help="environment, for example core/copy_text")
    numbers: dict[str, tuple[int | float, str]] = {
        "--level": (0, "difficulty"),
        "--seed": (0, "run seed"),
        "--index": (0, "number of the first problem"),
        "--count": (1, "problems"),
    }
    add_numbers(sample, numbers)
    _add_asking(sample)
    add_flags(sample, json="one JSON object a problem")
    register_check(actions)
    register_plot(actions)
    _register_calibrate(actions)


def _add_asking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--style",
        metavar="S",
        type=PromptPreprocessor,
        help=f"ask as custom_prompt_preprocessor does: {', '.join(PromptPreprocessor)}",
    )
    parser.add_argument(
        "--answer-marker",
        metavar="M",
        type=AnswerMarker,
        help=f"ask for answers as answer_marker_type does: {', '.join(AnswerMarker)}",
    )
    parser.add_argument(
        "--model", metavar="M", default=DEFAULT_MODEL, help="name, folder or GGUF file (default: the built-in model)"
    )
    parser.add_argument(
        "--parameter",
        dest="parameters",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="parameter of the environment, for example style=compact; may be given several times",
    )


def _register_calibrate(actions: Parsers) -> None:
    parser = add_command(
        actions,
        "calibrate",
        run_calibrate,
        help="measure how hard the levels of environments are for a model",
        description="Give the accuracy of a model by level, with 95 % intervals, and the level to start training at.",
        epilog=_CALIBRATE,
    )
    parser.add_argument("ids", metavar="ID", nargs="+", help="environments: ids, patterns of ids, or paths")
    parser.add_argument("--levels", metavar="L", type=int, nargs="+", help="levels to measure (default: the first six)")
    add_numbers(
        parser,
        {
            "--samples": (64, "problems of a level"),
            "--temperature": (1.0, "of sampling"),
            "--max-response-len": (64, "tokens"),
            "--seed": (0, "of problems and answers"),
        },
    )
    _add_asking(parser)
    parser.add_argument("--threads", metavar="N", type=int, help="of the engine (default: as in a run)")
    add_flags(parser, no_chat_template="send the question as it is", quiet=True, json="one JSON object")


def run_list(arguments: argparse.Namespace) -> int:
    """Print the environments."""
    environments = listed_environments()
    if arguments.json:
        print(json.dumps([_row(name, each) for name, each in environments.items()]))
        return 0
    width = max(map(len, environments))
    for name, each in environments.items():
        if isinstance(each, ConfigError | str):
            print(f"{name:{width}}  {each}")
            continue
        levels = "0 up" if each.max_level is None else f"0-{each.max_level}"
        guessed = "" if each.guess_rate is None else f"{each.guess_rate[1]:.0%}"
        print(f"{name:{width}}  {levels:5}  {guessed:>4}  {each.summary}")
    return 0


def _row(name: str, found: EnvironmentFacts | ConfigError | str) -> dict[str, Any]:
    if isinstance(found, ConfigError | str):
        return {"id": name, "summary" if isinstance(found, str) else "error": str(found)}
    return {
        "id": name,
        "version": found.version,
        "max_level": found.max_level,
        "multi_turn": found.is_multi_turn,
        "guess_rate": found.guess_rate,
        "summary": found.summary,
    }


def run_sample(arguments: argparse.Namespace) -> int:
    """Print problems.

    Raises:
        ConfigError: If there is no such environment or level, or its questions cannot be asked in the style.
        TaskFailedError: If a problem cannot be made.
    """
    if not 1 <= arguments.count <= 100_000:
        raise ConfigError(f"--count {arguments.count}: must be 1 to 100000")
    tasks = sample_tasks(
        ChosenEnvironment(arguments.id, _parameters(arguments.parameters)),
        MakingPlan.alone(folders=[Path.cwd()]),
        level=arguments.level,
        indices=range(arguments.index, arguments.index + arguments.count),
        seed=arguments.seed,
    )
    shown = [task.question for task in tasks]
    style, marker = arguments.style, arguments.answer_marker
    if style is not None or marker is not None:
        tokenizer = app.load_model(arguments.model, with_weights=False).tokenizer
        renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None, preprocessor=style, marker=marker)
        is_chat = style is PromptPreprocessor.CHAT
        shown = [renderer.render(each, apply_chat_template=is_chat).text for each in shown]
    for task, text in zip(tasks, shown, strict=True):
        if arguments.json:
            about = {key: value for key, value in msgspec.to_builtins(task).items() if key != "hidden"}
            prompt = {} if style is None and marker is None else {"prompt": text}
            print(json.dumps({"id": about.pop("environment"), **about, **prompt}, ensure_ascii=False))
            continue
        print(f"{task.environment} level {task.level} seed {task.seed}\n\n{text}\n")
        print(f"answer: {task.answer if task.answer is not None else 'any that passes the verifier'}")
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure, and recommend a level.

    Raises:
        ConfigError: If an option is wrong, or there is no such environment or level; nothing has been started.
        RollfeedError: If the engine fails.
    """
    parameters = _parameters(arguments.parameters)
    levels = _levels(arguments, parameters)
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
    with StatusLine(progress_line, quiet=arguments.quiet) as progress:
        measuring = app.calibrate_environments(
            levels,
            model=app.load_model(arguments.model),
            num_samples=arguments.samples,
            sampling=sampling,
            seed=arguments.seed,
            parameters=parameters,
            apply_chat_template=not (arguments.no_chat_template or arguments.style is PromptPreprocessor.TINY_ZERO),
            preprocessor=arguments.style,
            marker=arguments.answer_marker,
            engine_settings=engine_settings,
            folders=[Path.cwd()],
            on_progress=progress,
        )
        found = asyncio.run(exit_codes.until_signal(measuring))
    if arguments.json:
        print(json.dumps(_record(arguments, parameters, found)))
    else:
        for calibration in found:
            _print_calibration(calibration, arguments.max_response_len)
    return exit_codes.DONE


def _levels(arguments: argparse.Namespace, parameters: dict[str, Any]) -> dict[str, list[int]]:
    """Return the levels to measure by environment, checked before a model is loaded for them.

    One that an environment does not have is left out of it, unless none has it.
    """
    ids = chosen_ids(arguments.ids)
    chosen = [ChosenEnvironment(each, parameters) for each in ids]
    facts = [maker.facts for maker in MakingPlan.alone(folders=[Path.cwd()]).make(chosen, seed=0)]
    wanted = sorted(set(arguments.levels or range(_DEFAULT_LEVELS)))
    found = {
        name: [level for level in wanted if level >= 0 and (each.max_level is None or level <= each.max_level)]
        for name, each in zip(ids, facts, strict=True)
    }
    for level in arguments.levels or ():
        if not any(level in levels for levels in found.values()):
            hardest = max(sys.maxsize if each.max_level is None else each.max_level for each in facts)
            known = "0 and up" if hardest == sys.maxsize else f"0 to {hardest}"
            raise ConfigError(f"--levels {level}: the levels of {', '.join(ids[:3])} are {known}")
    return {name: levels for name, levels in found.items() if levels}


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


def _record(arguments: argparse.Namespace, parameters: dict[str, Any], found: Sequence[Calibration]) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "parameters": parameters,
        "samples": arguments.samples,
        "temperature": arguments.temperature,
        "max_response_len": arguments.max_response_len,
        "seed": arguments.seed,
        "seconds": round(found[0].seconds, 3),
        "environments": [
            {
                "environment": calibration.environment_id,
                "levels": [
                    {
                        "level": each.level,
                        **each.found.summary(),
                        "accuracy_of_ended": each.accuracy_of_ended,
                        "cut_short": each.is_cut_short,
                    }
                    for each in calibration.levels
                ],
                "unusable": {str(level): cause for level, cause in calibration.unusable.items()},
                "recommended": calibration.recommended,
            }
            for calibration in found
        ],
    }


def _print_calibration(calibration: Calibration, max_response_len: int) -> None:
    print(f"{calibration.environment_id}\nlevel  accuracy (95 % interval)   reward  answer found  truncated")
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
    for level, cause in calibration.unusable.items():
        print(f"{level:5}  {cause}")
    for each in calibration.levels:
        if each.is_cut_short:
            ended = each.accuracy_of_ended
            told = "none ended before" if ended is None else f"of those that ended before, {ended:.1%} are right"
            print(
                f"level {each.level}: {each.found.truncated_ratio:.1%} of the answers were cut at {max_response_len} "
                f"tokens, and {told}: raise --max-response-len"
            )
    if calibration.recommended is None:
        print(
            f"no level of {calibration.environment_id} has an accuracy of 5 to 60 %: measure others, or choose another "
            "environment"
        )
    else:
        print(f"recommended: level {calibration.recommended}, the lowest with an accuracy of 5 to 60 %")
