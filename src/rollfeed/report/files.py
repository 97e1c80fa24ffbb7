"""The files that show the curves of a run while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollfeed.base.atomic import replace_file
from rollfeed.errors import in_one_line
from rollfeed.report.curves import Curves
from rollfeed.report.page import page

_log = logging.getLogger(__name__)

CURVE_PICTURE, CURVE_PAGE = "curve.png", "curve.html"


def warn_without_drawing() -> None:
    """Say before a training what it will not draw."""
    if (cause := _import_drawing()[1]) is not None:
        _log.warning(
            "%s is left out, as matplotlib cannot be used (%s): pip install 'rollfeed[train]'",
            CURVE_PICTURE,
            in_one_line(cause),
        )


def _import_drawing() -> tuple[Callable[..., None] | None, Exception | None]:
    """Return what draws, or why nothing does; only training pays for the half second that the import takes."""
    try:
        from rollfeed.report.picture import draw
    except Exception as error:  # one that does not fit what else is installed raises whatever it does
        return None, error
    return draw, None


def write_curves(directory: Path, curves: Curves, *, settings: Mapping[str, Any]) -> None:
    """Write curve.html, and with matplotlib curve.png, into a run directory, whose name is the title.

    ``settings`` are as settings.json has them.
    """
    title = directory.resolve().name or str(directory)
    text = page(curves, title=title, settings=settings)
    replace_file(directory / CURVE_PAGE, lambda file: file.write(text.encode("utf-8", "replace")))
    draw, _ = _import_drawing()
    if draw is not None:
        replace_file(directory / CURVE_PICTURE, lambda file: draw(curves, title=title, file=file))
