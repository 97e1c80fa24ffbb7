"""Reads from a run directory how its run was started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollfeed.config import RunSpec, Settings, chosen_keys, read_stored
from rollfeed.errors import ConfigError
from rollfeed.store import RunReader
from rollfeed.store.journal import RunRecord
from rollfeed.store.layout import JOURNAL


def stored_spec(directory: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Return what the run in ``directory`` was built from, with ``key=value`` overrides; it is only read.

    Raises:
        ConfigError: If there is no run, it is damaged, or its settings are not those of this version.
    """
    directory = Path(directory)
    record = _record(directory)
    settings = read_stored(record.settings, where=f"settings of {directory}", overrides=overrides)
    return RunSpec(settings, stored_folders(directory), chosen_keys(record.settings, overrides, settings))


def stored_folders(directory: Path) -> tuple[Path, ...]:
    """Return where the run in ``directory`` looked for files and plug-ins, and this folder.

    Raises:
        ConfigError: If there is no run, or it is damaged.
    """
    return tuple(dict.fromkeys([*map(Path, _record(directory).folders), Path.cwd()]))


def stored_template_date(settings: Settings, out: Path) -> str | None:
    """Return which date the chat templates of the run in ``out`` are told; None without a run or a date.

    Raises:
        ConfigError: If the settings name another one.
    """
    if not (out / JOURNAL).exists():
        return None
    stored: str | None = _record(out).settings.get("model", {}).get("template_date")
    given = settings.model.template_date
    if stored is not None and given not in (stored, None):
        raise ConfigError(
            f"model.template_date = {given!r}: the run in {out} was begun with {stored!r}; leave it out, or choose "
            "another --out"
        )
    return stored


def _record(directory: Path) -> RunRecord:
    with RunReader(directory) as reader:
        return reader.run()
