"""``rollfeed graders``: the graders by ``rm_type``, with an example of each that is graded as it is shown."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any, NamedTuple

from rollfeed.cli.arguments import Parsers, add_command, add_flags
from rollfeed.errors import ConfigError, suggestion

_EPILOG = """An example is a row of `rollfeed score`; a settings file names a grader with [reward] rm_type. boxed_NAME
grades the content of the last box only. docs/rewards.md says more of each.

example: rollfeed graders math
"""


class _Example(NamedTuple):
    """A row for a grader."""

    told: str
    """How it compares."""
    label: Any = None
    response: str = ""
    metadata: dict[str, Any] | None = None
    is_graded: bool = True
    """False where it takes a server, a problem or programs."""


_EXAMPLES = {
    "math": _Example("the last box equals the label", "1/2", "So it is \\boxed{0.5}."),
    "deepscaler": _Example("as math, after </think>", "4", "<think>2 + 2</think> \\boxed{4}"),
    "math_verify": _Example("as math; without a box the answer that is last", ["4", "four"], "2 + 2 = 4"),
    "dapo": _Example('the last "Answer:" line equals the label; else -1', "4", "2 + 2 is four.\nAnswer: 4"),
    "exact": _Example("the same text, case and blanks aside", "Paris", "<answer>paris</answer>"),
    "number": _Example("the last number is the label", 12, "7 and 5 are 12."),
    "f1": _Example("F1 of the words", "the red house", "a red barn"),
    "gpqa": _Example("the choice that is the label", "B", "Answer: B", {"choices": ["2", "4"]}),
    "bbeh": _Example('what follows "The answer is"', "yes", "The answer is: Yes"),
    "ifeval": _Example("instructions that are followed", None, "hello, world", {
        "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}),
    "ifeval_loose": _Example("as ifeval, also without the first or last line", None, "Yes, sir:\nhello world", {
        "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}),
    "random": _Example("0 or 1 by chance, the same for the same sample"),
    "livecodebench": _Example("the last Python block passes all tests", {
        "inputs": ["2 3\n"], "outputs": ["5\n"]},
        "```python\nprint(sum(map(int, input().split())))\n```", is_graded=False),
    "environment": _Example("what the environment in the metadata says", is_graded=False),
    "rlve": _Example("the same for rows as RLVE writes them", is_graded=False),
    "remote_rm": _Example("what a server says", "4", "4", is_graded=False),
    "reward_model": _Example("the score of a model", is_graded=False),
}  # fmt: skip


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "graders",
        run,
        description="List what rm_type may be, with an example of each and the reward that it has.",
        epilog=_EPILOG,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these (default: all)")
    add_flags(parser, json="one JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Grade the examples and print them. Raises ConfigError if there is no such grader."""
    for name in arguments.names:
        if name not in _EXAMPLES:
            raise ConfigError(f"grader {name!r}: no such grader; {suggestion(name, _EXAMPLES)}")
    found = asyncio.run(_graded(arguments.names or list(_EXAMPLES)))
    if arguments.json:
        print(json.dumps(found))
        return 0
    for each in found:
        print(f"{each['rm_type']:14} {each['compares']}")
        if each["response"]:
            reward = "" if each["reward"] is None else f"  -> {each['reward']:g}"
            about = f", metadata {json.dumps(each['metadata'])}" if each["metadata"] else ""
            print(f"{'':14} label {json.dumps(each['label'])}, response {json.dumps(each['response'])}{about}{reward}")
    return 0


async def _graded(names: list[str]) -> list[dict[str, Any]]:
    # Fetched here, as it takes a while that a mistake need not wait for.
    from rollfeed.app import grade_rows

    found = {name: _EXAMPLES[name] for name in names}
    rows = [
        {"id": name, "rm_type": name, "label": each.label, "response": each.response, "metadata": each.metadata}
        for name, each in found.items()
    ]
    graded = [row for row in rows if found[str(row["id"])].is_graded]
    rewards = {result["id"]: result["reward"] async for result in grade_rows(graded)}
    return [
        {**{name: row[name] for name in ("rm_type", "label", "response", "metadata")}}
        | {"compares": found[str(row["id"])].told, "reward": rewards.get(row["id"])}
        for row in rows
    ]
