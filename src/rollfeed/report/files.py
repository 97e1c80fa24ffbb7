"""The files that show the curves of a run while it goes on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from rollfeed.errors import ConfigError
from rollfeed.report.curves import Curves
from rollfeed.report.page import page

CURVE_PICTURE, CURVE_PAGE = "curve.png", "curve.html"

ReplaceFile = Callable[[Path, Callable[[IO[bytes]], object]], None]
"""Puts what the function writes at the path, whole or not at all."""


def require_drawing() -> None:
    """Check that pictures can be drawn, before anything is started that would need one.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "training draws its curve with matplotlib, which is not installed: pip install 'rollfeed[train]'"
        )


class CurveFiles:
    """Writes curve.png and curve.html into a run directory."""

    def __init__(
        self, directory: Path, *, settings: Mapping[str, Any], read: Callable[[], Curves], replace_file: ReplaceFile
    ) -> None:
        """Take what is drawn and how it is written.

        Args:
            directory: Of the run; its name is the title.
            settings: As settings.json has them.
            read: Gives the curves as they are now.
            replace_file: Writes a file whole or not at all.
        """
        self._directory = directory
        self._title = directory.resolve().name or str(directory)
        self._settings = settings
        self._read = read
        self._replace_file = replace_file

    def write(self) -> None:
        """Write both files anew, from the curves as they are now."""
        # matplotlib takes half a second to import, and only training draws.
        from rollfeed.report.picture import draw

        curves = self._read()
        text = page(curves, title=self._title, settings=self._settings)
        self._replace_file(self._directory / CURVE_PAGE, lambda file: file.write(text.encode("utf-8", "replace")))
        self._replace_file(self._directory / CURVE_PICTURE, lambda file: draw(curves, title=self._title, file=file))
