"""What a run directory says of how its run was started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollfeed.config import Settings, chosen_keys, read_stored
from rollfeed.errors import ConfigError
from rollfeed.store import RunReader
from rollfeed.store.journal import RunRecord
from rollfeed.store.layout import JOURNAL


def stored_settings(directory: Path, overrides: Sequence[str] = ()) -> tuple[Settings, list[Path]]:
    """Return the settings of the run in ``directory``, and where it looked for data files and plug-ins.

    Args:
        directory: A run directory; only read.
        overrides: ``key=value``, as on the command line.

    Raises:
        ConfigError: If there is no run, it is damaged, or its settings are not those of this version.
    """
    record = _record(directory)
    settings = read_stored(record.settings, where=f"settings of {directory}", overrides=overrides)
    return settings, [Path(folder) for folder in record.folders]


def chosen_of_stored(directory: Path, overrides: Sequence[str], settings: Settings) -> frozenset[str]:
    """Return the keys that overrides decide; :func:`stored_settings` has returned ``settings``."""
    return chosen_keys(_record(directory).settings, overrides, settings)


def _record(directory: Path) -> RunRecord:
    with RunReader(directory) as reader:
        return reader.run()


def stored_template_date(settings: Settings, out: Path) -> str | None:
    """Return which date the chat templates of the run in ``out`` are told; None without a run or a date.

    Raises:
        ConfigError: If the settings name another one.
    """
    if not (out / JOURNAL).exists():
        return None
    with RunReader(out) as reader:
        stored: str | None = reader.run().settings.get("model", {}).get("template_date")
    given = settings.model.template_date
    if stored is not None and given not in (stored, None):
        raise ConfigError(
            f"model.template_date = {given!r}: the run in {out} was begun with {stored!r}; leave it out, or choose "
            "another --out"
        )
    return stored
