"""Prompt sources, from settings or one by one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rollfeed import plugins
from rollfeed.app.sources.rows import RowChecks
from rollfeed.config import DatasetSettings, Settings
from rollfeed.config.paths import expand_path
from rollfeed.environments import EnvironmentRegistry, EnvironmentSource, with_parameters
from rollfeed.prompts import ChatRenderer, ColumnKeys, DatasetSource, MixtureSource
from rollfeed.protocols import PromptSource, Tokenizer
from rollfeed.types import Prompt

_log = logging.getLogger(__name__)


def environment_source(environment_id: str, *, level: int, seed: int, tokenizer: Tokenizer) -> PromptSource:
    """Return a built-in or registered environment as a prompt source.

    Raises:
        ConfigError: If there is no such environment or level.
    """
    renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None)
    return EnvironmentSource(EnvironmentRegistry().get(environment_id), level=level, seed=seed, renderer=renderer)


def build_source(
    settings: Settings, tokenizer: Tokenizer, *, folders: Sequence[Path] = (), rows: RowChecks | None = None
) -> PromptSource:
    """Return the prompt source that the settings describe, read and checked.

    Args:
        settings: The whole tree.
        tokenizer: The policy's.
        folders: Where data files and plug-in modules are looked for, in this order.
        rows: Check that rows can be answered and scored.

    Raises:
        ConfigError: If a file, column, row, environment or plug-in is wrong; one line that names it.
    """
    path = settings.plugins.prompt_source
    if path is not None:
        return plugins.load_factory(path, PromptSource, tokenizer, key="plugins.prompt_source", folders=folders)
    renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=settings.max_prompt_length)
    sources: list[tuple[str, float, PromptSource]] = []
    registry = EnvironmentRegistry()
    for environment in settings.prompts.environments:
        made = EnvironmentSource(
            with_parameters(registry.get(environment.id), environment.parameters),
            level=environment.level,
            seed=settings.seed,
            renderer=renderer,
            apply_chat_template=environment.apply_chat_template,
        )
        sources.append((made.name, environment.weight, made))
    for dataset in settings.prompts.datasets:
        read = _dataset_source(dataset, settings, renderer, folders, rows)
        _tell_what_was_left_out(read, settings)
        sources.append((read.name, dataset.weight, read))
    return MixtureSource(sources, seed=settings.seed)


def find_file(path: str, folders: Sequence[Path]) -> Path:
    """Return the first of ``folders`` with such a file; a slice ``@[a:b]`` behind the name does not count.

    ``~`` and environment variables are replaced. A file that is nowhere is returned all the same, for its reader to
    complain of.
    """
    path = expand_path(path)
    for folder in folders:
        for name in (path, path.rpartition("@[")[0]):
            if name and (folder / name).exists():
                return folder / path
    return Path(path)


def _dataset_source(
    dataset: DatasetSettings,
    settings: Settings,
    renderer: ChatRenderer,
    folders: Sequence[Path],
    rows: RowChecks | None,
) -> DatasetSource:
    def unlabelled(prompt: Prompt, rm_type: str) -> str:
        return f"prompts.datasets: rm_type = {rm_type!r} needs labels, and {dataset.path} has none: set its label_key"

    return DatasetSource(
        str(find_file(dataset.path, folders)),
        name=dataset.name,
        renderer=renderer,
        keys=ColumnKeys(
            input_key=dataset.input_key,
            label_key=dataset.label_key,
            metadata_key=dataset.metadata_key,
            tools_key=dataset.tools_key,
            image_key=dataset.image_key,
        ),
        apply_chat_template=dataset.apply_chat_template,
        rollout_shuffle=settings.prompts.rollout_shuffle,
        seed=settings.seed,
        num_epoch=settings.prompts.num_epoch,
        skip_bad_rows=settings.prompts.skip_bad_rows,
        check_row=None if rows is None else rows.of(dataset.path, label_key=dataset.label_key, unlabelled=unlabelled),
    )


def _tell_what_was_left_out(dataset: DatasetSource, settings: Settings) -> None:
    if dataset.num_over_length:
        _log.warning(
            "%d prompts of %s are over rollout_max_prompt_len = %d tokens and are left out",
            dataset.num_over_length,
            dataset.name,
            settings.max_prompt_length,
        )
    if dataset.num_bad_rows:
        _log.warning(
            "%d rows of %s cannot be used and are left out, the first: %s",
            dataset.num_bad_rows,
            dataset.name,
            dataset.first_bad_row,
        )


def source_names(settings: Settings) -> list[str]:
    """Return what a run draws its prompts from, for people."""
    if settings.plugins.prompt_source is not None:
        return [settings.plugins.prompt_source]
    environments = [f"{each.id}@{each.level}" for each in settings.prompts.environments]
    return environments + [dataset.name or dataset.path for dataset in settings.prompts.datasets]
