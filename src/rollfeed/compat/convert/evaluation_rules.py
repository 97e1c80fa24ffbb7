"""slime's flags and file of evaluation sets, as ``[eval]``."""

from __future__ import annotations

import re
from dataclasses import replace

from rollfeed.compat.convert.draft import Draft, name_columns
from rollfeed.compat.convert.eval_config import read_eval_config
from rollfeed.compat.convert.given import wrong
from rollfeed.compat.convert.table import FLAGS


def set_evaluation(draft: Draft) -> None:
    """Set ``[eval]`` and when it is measured. Raises ConfigError as :func:`eval_sets`."""
    if not eval_sets(draft):
        for name, flag in FLAGS.items():
            if flag.section == "Evaluation" or name == "eval-reward-key":
                draft.left.setdefault(name, "no evaluation sets are named")
        return
    _eval_defaults(draft)
    if draft.value("debug-rollout-only"):
        draft.leave("eval-interval", "only `rollfeed train` evaluates on the way")
    elif "eval-interval" in draft.flags:
        draft.put("train.eval_interval", draft.value("eval-interval"), "eval-interval")


def eval_sets(draft: Draft) -> bool:
    """Set the evaluation sets, and return whether there are any.

    Raises:
        ConfigError: If a file of sets is wrong, or names and paths are not pairs.
    """
    config, pairs = draft.value("eval-config"), draft.value("eval-prompt-data")
    if config:
        draft.leave("eval-prompt-data", "--eval-config goes before it")
        _eval_config(draft, config)
    elif pairs:
        pairs = ["aime", *pairs] if len(pairs) == 1 else pairs
        if len(pairs) % 2:
            raise wrong(draft.flags["eval-prompt-data"], "must be names and paths in turn: add the one that misses")
        for number in range(0, len(pairs), 2):
            draft.put(f"eval.datasets.{number // 2}.name", pairs[number], "eval-prompt-data")
            draft.put(f"eval.datasets.{number // 2}.path", pairs[number + 1], "eval-prompt-data")
    return bool(config or pairs)


def _eval_config(draft: Draft, path: str) -> None:
    found = read_eval_config(path, folder=draft.folder)
    tables = {"eval.": found.defaults}
    tables |= {f"eval.datasets.{number}.": each for number, each in enumerate(found.datasets)}
    for at, table in tables.items():
        draft.settings |= {f"{at}{key}": replace(setting, flags=("eval-config",)) for key, setting in table.items()}
    draft.left_keys += found.left


def _eval_defaults(draft: Draft) -> None:
    """Set what sets do not say; a file's own defaults go before flags."""
    own = dict(draft.settings)
    for name, flag in FLAGS.items():
        if flag.becomes and "eval-config" in getattr(own.get(flag.becomes[0]), "flags", ()):
            draft.left.setdefault(name, "the defaults of --eval-config go before it")
    number = "n-samples-per-eval-prompt"
    draft.put("eval.n_samples_per_prompt", draft.value(number), number)
    paths = [setting.value for key, setting in own.items() if re.fullmatch(r"eval\.datasets\.\d+\.path", key)]
    if len({draft.columns(path) for path in paths}) == 1:
        name_columns(draft, "eval.", paths[0], "eval-")
    else:
        for at, path in enumerate(paths):
            name_columns(draft, f"eval.datasets.{at}.", path, "eval-")
    draft.put("eval.apply_chat_template", draft.value("apply-chat-template"), "apply-chat-template")
    draft.settings |= {key: setting for key, setting in own.items() if key.startswith("eval.")}
