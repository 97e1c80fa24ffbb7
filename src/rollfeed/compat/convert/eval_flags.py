"""slime's evaluation flags for a settings file that is ours already."""

from __future__ import annotations

from collections.abc import Sequence

from rollfeed.compat.convert.draft import Draft
from rollfeed.compat.convert.evaluation_rules import eval_sets
from rollfeed.compat.convert.given import Flags
from rollfeed.compat.convert.shell_scripts import Word
from rollfeed.compat.convert.table import EVAL_FLAGS
from rollfeed.compat.convert.toml_text import nested, value_text


def eval_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return ``key=value`` overrides of a settings file, and keys of ``--eval-config`` that are not among them.

    What is not given stays as the file has it; a file of sets goes before flags, as in slime.

    Args:
        words: Flags of :data:`EVAL_FLAGS` with their values.

    Raises:
        ConfigError: If a value is wrong, or the file of sets is.
    """
    flags = Flags([Word(word, "") for word in words], in_file=False)
    draft = Draft(flags, runs_async=False, folder=None)
    for flag in EVAL_FLAGS:
        if flag.name in flags and flag.becomes[0] != "eval.datasets":
            draft.put(flag.becomes[0], flags.value(flag.name), flag.name)
    eval_sets(draft)
    found = nested(draft.settings).get("eval", {})
    return [f"eval.{key}={value_text(value)}" for key, value in found.items()], draft.left_keys
