"""Settings under way from flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollfeed.compat.convert.given import Flags, wrong
from rollfeed.compat.convert.table import FLAGS
from rollfeed.compat.convert.toml_text import Setting

SLIME_DEFAULT = "slime's default"
_SAMPLED_ROWS = 1000


class Draft:
    """Settings that flags become, one after another; what is not carried over has its reason."""

    def __init__(self, flags: Flags, *, runs_async: bool, folder: Path | None) -> None:
        self.flags = flags
        self.settings: dict[str, Setting] = {}
        self.left: dict[str, str] = {}
        """Reasons, by the name of the flag."""
        self.left_keys: list[tuple[str, str]] = []
        """Keys of files, and why they are not carried over."""
        self.notes: list[str] = []
        self.runs_async = runs_async
        self.folder = folder
        self._columns: dict[str, frozenset[str] | None] = {}
        self.mode = "sync"
        """``rollout.mode``."""
        self.is_restricted = False
        """Whether sampling leaves tokens out that are not stored."""
        self.context_length = 0
        """``engine.context_length``."""

    def value(self, name: str) -> Any:
        """Return what a flag is, given or not."""
        return self.flags.value(name)

    def columns(self, path: str) -> frozenset[str] | None:
        """Return the columns of a file of prompts; None where it cannot be read here."""
        if path not in self._columns:
            self._columns[path] = _columns_of(path)
        return self._columns[path]

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key; the flags of it that were given are its origin, else it is slime's default."""
        given = tuple(name for name in names if name in self.flags)
        origin = ", ".join(str(self.flags[name]) for name in given) or SLIME_DEFAULT
        self.settings[key] = Setting(value, origin, given)

    def leave(self, name: str, reason: str) -> None:
        """Carry a flag over to nothing."""
        self.left[name] = reason


def _columns_of(path: str) -> frozenset[str] | None:
    """Return the columns of a file of prompts, of JSON lines those of its first rows; None where it is not here."""
    file = Path(path.partition("@[")[0]).expanduser()
    try:
        if file.suffix == ".parquet":
            return frozenset(pq.read_schema(file).names)
        with file.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for _, line in zip(range(_SAMPLED_ROWS), lines, strict=False) if line.strip()]
    except (OSError, ValueError, pa.ArrowException):
        return None
    return frozenset(key for row in rows if isinstance(row, dict) for key in row)


def name_columns(draft: Draft, at: str, path: str, kind: str) -> None:
    """Name the columns of a file that it has; all that slime would ask for where the file is not here."""
    columns = draft.columns(path)
    for name, key in (
        ("input", "input_key"),
        ("label", "label_key"),
        ("metadata", "metadata_key"),
        ("tool", "tools_key"),
    ):
        own = [f"{kind}{name}-key", f"{name}-key"] if f"{kind}{name}-key" in FLAGS else [f"{name}-key"]
        value = next((draft.value(each) for each in own if draft.value(each) is not None), None)
        if value is None:
            continue
        if columns is not None and value not in columns and name in ("metadata", "tool"):
            for each in own:
                draft.left.setdefault(each, f"{path} has no such column")
            continue
        draft.put(f"{at}{key}", value, *own[:1], *([] if own[0] in draft.flags else own[1:]))
    media = draft.value("multimodal-keys")
    if isinstance(media, dict) and media:
        if "image" in media and (columns is None or media["image"] in columns):
            draft.put(f"{at}image_key", media["image"], "multimodal-keys")
        if "video" in media and (columns is None or media["video"] in columns):
            draft.put(f"{at}video_key", media["video"], "multimodal-keys")
        if set(media) - {"image", "video"}:
            draft.leave("multimodal-keys", "images and videos are carried over, other media are not")
    elif media is not None and not isinstance(media, dict):
        raise wrong(draft.flags["multimodal-keys"], 'is no JSON object: write \'{"image": "column"}\'')
