"""Prompts of TRL's data sets as ours, and which row a prompt is that the trainer hands over."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollfeed.app.build import Functions
from rollfeed.app.sources import RowChecks
from rollfeed.config import RolloutConfig
from rollfeed.errors import ConfigError
from rollfeed.prompts import ChatRenderer, ColumnKeys, LoadedPrompts, load_prompts
from rollfeed.prompts.messages import read_message
from rollfeed.protocols import Tokenizer
from rollfeed.types import Prompt


def load_rows(
    dataset: Any, *, name: str, tokenizer: Tokenizer, made: Functions, keys: ColumnKeys, config: RolloutConfig | None
) -> LoadedPrompts:
    """Return the prompts of a data set of the ``datasets`` library; their ids are ``name/row``.

    They speak of the tools that ``made`` has. ``config`` is what scores them; None where nothing here does.

    Raises:
        ConfigError: If it cannot be read, has images, or a row cannot be used or scored.
    """
    if not hasattr(dataset, "to_parquet") or not len(dataset):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}: give a Dataset with rows, all of which are there at once"
        )
    if found := {"image", "images"}.intersection(dataset.column_names):
        raise ConfigError(f"{name} has a column {found.pop()!r}: prompts with images cannot be answered, remove it")
    check = None
    if config is not None:
        unscored = "give reward functions, or a config with reward.rm_type or plugins.reward"
        rows = RowChecks(config, unscored=unscored, no_images=None, label_problems=made.services.judges.problems())
        check = rows.of(
            name, label_key=keys.label_key, unlabelled=lambda _, rm_type: f"{name}: {rm_type!r} needs label_key"
        )
    tools = made.services.toolbox
    renderer = ChatRenderer(
        tokenizer, rollout_max_prompt_len=None, tools=tools.definitions, call_format=tools.call_format
    )
    is_chat = not isinstance(dataset[0].get(keys.input_key), str)
    with tempfile.TemporaryDirectory(prefix="rollfeed-trl-") as folder:
        file = Path(folder, f"{name}.parquet")
        dataset.to_parquet(str(file))
        try:
            return load_prompts(str(file), renderer=renderer, keys=keys, apply_chat_template=is_chat, check_row=check)
        except ConfigError as error:
            raise type(error)(
                str(error).replace(str(file), name).replace(", or set skip_bad_rows = true", "")
            ) from None


class PromptTable:
    """Finds the rows of prompts that a trainer hands over.

    Raises:
        ConfigError: If two have the same prompt and differ in label or metadata.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._rows: dict[str, Prompt] = {}
        for prompt in prompts:
            known = self._rows.setdefault(_key(prompt.messages or prompt.text), prompt)
            if (known.label, known.metadata) != (prompt.label, prompt.metadata):
                raise ConfigError(
                    f"{known.prompt_id} and {prompt.prompt_id} have the same prompt, which is all that TRL hands over, "
                    "and another label or metadata: remove one"
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self._rows.values())

    def __getitem__(self, asked: str | Sequence[Mapping[str, Any]]) -> Prompt:
        messages = asked if isinstance(asked, str) else [read_message(each, "a message") for each in asked]
        if (known := self._rows.get(_key(messages))) is None:
            raise ConfigError(f"a prompt is in no data set of the trainer, where rollfeed looks it up: {asked!r:.200}")
        return known


def _key(asked: str | Sequence[Mapping[str, Any]]) -> str:
    return asked if isinstance(asked, str) else json.dumps(asked, sort_keys=True)
