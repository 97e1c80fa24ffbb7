"""The files that show the curves of a run while it goes on."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollfeed.base.atomic import replace_file
from rollfeed.errors import in_one_line
from rollfeed.report.curves import Curves
from rollfeed.report.page import page

_log = logging.getLogger(__name__)

CURVE_PICTURE, CURVE_PAGE = "curve.png", "curve.html"


def warn_without_drawing() -> None:
    """Say before a training what it will not draw."""
    if (cause := import_drawing()[1]) is not None:
        _log.warning(
            "%s is left out, as matplotlib cannot be used (%s): pip install 'rollfeed[train]'",
            CURVE_PICTURE,
            in_one_line(cause),
        )


def import_drawing() -> tuple[ModuleType | None, Exception | None]:
    """Return what draws, or why nothing does; only what draws pays for the half second that the import takes."""
    try:
        return importlib.import_module("rollfeed.report.picture"), None
    except Exception as error:  # one that does not fit what else is installed raises whatever it does
        return None, error


def write_page(path: Path, text: str) -> None:
    """Write a page, whole or not at all; characters that no page can have are replaced."""
    replace_file(path, lambda file: file.write(text.encode("utf-8", "replace")))


def write_curves(directory: Path, curves: Curves, *, settings: Mapping[str, Any]) -> None:
    """Write curve.html, and with matplotlib curve.png, into a run directory, whose name is the title.

    ``settings`` are as settings.json has them.
    """
    title = directory.resolve().name or str(directory)
    write_page(directory / CURVE_PAGE, page(curves, title=title, settings=settings))
    picture, _ = import_drawing()
    if picture is not None:
        replace_file(directory / CURVE_PICTURE, lambda file: picture.draw(curves, title=title, file=file))
