"""The tools of ``files``: list, read and write within one folder, which no path leads out of."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollfeed.errors import ConfigError, ToolError

_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 1_000
_PATH = {"type": "string", "description": "Path of a file within the folder, such as notes/a.txt"}


class FileTool:
    """Fits :class:`rollfeed.protocols.Tool`: one action on files of a folder."""

    def __init__(
        self,
        name: str,
        description: str,
        properties: Mapping[str, Any],
        run: Callable[..., str],
        *,
        required: bool = True,
        is_idempotent: bool = True,
    ) -> None:
        self.name = name
        self.description = description
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": list(properties) if required else [],
            "additionalProperties": False,
        }
        self.is_idempotent = is_idempotent
        self._run = run

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return what the action gave. Raises ToolError if it cannot be done."""
        try:
            return await asyncio.to_thread(self._run, **arguments)
        except OSError as error:
            raise ToolError(f"{arguments.get('path', '')!r:.200}: {error.strerror or error}") from error


def file_tools(folder: Path, *, is_writable: bool) -> list[FileTool]:
    """Return the tools of a folder, which all episodes share. Raises ConfigError if there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(f"tools.files.folder = {str(folder)!r}: no such folder")
    files = _Folder(folder)
    content = {"type": "string", "description": "All that the file is to hold"}
    tools = [
        FileTool("list_files", "Lists the files of a folder.", {"path": _PATH}, files.names, required=False),
        FileTool("read_file", "Returns the text of a file.", {"path": _PATH}, files.read),
    ]
    if is_writable:
        make = "Makes a text file, or replaces one."
        properties = {"path": _PATH, "content": content}
        tools.append(FileTool("write_file", make, properties, files.write, is_idempotent=False))
    return tools


class _Folder:
    """Opens what lies within a folder, one name at a time from there, so that neither ``..`` nor a link leads out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, path: str = ".") -> str:
        with self._opened(_parts(path)) as place, os.scandir(place) as entries:
            names = sorted(
                f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
                for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False)
            )
        return "\n".join(names) or "(the folder is empty)"

    def read(self, path: str) -> str:
        *folders, name = _named(path)
        with self._opened(folders) as place:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ToolError(f"{path!r:.200} is no file")
            content = opened.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ToolError(f"{path!r:.200} has more than {_MAX_BYTES:,} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ToolError(f"{path!r:.200} is no text") from None

    def write(self, path: str, content: str) -> str:
        encoded = content.encode(errors="replace")
        if len(encoded) > _MAX_BYTES:
            raise ToolError(f"the content has more than {_MAX_BYTES:,} bytes")
        *folders, name = _named(path)
        with self._opened(folders, makes=True) as place:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(name, flags, 0o644, dir_fd=place)
        with os.fdopen(file, "wb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ToolError(f"{path!r:.200} is no file")
            opened.truncate()
            opened.write(encoded)
        return f"wrote {len(encoded):,} bytes"

    @contextmanager
    def _opened(self, folders: list[str], *, makes: bool = False) -> Iterator[int]:
        place = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in folders:
                if makes and name not in os.listdir(place):
                    os.mkdir(name, dir_fd=place)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
                os.close(place)
                place = inner
            yield place
        finally:
            os.close(place)


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\x00" in path:
        raise ToolError(f"{path!r:.200} leads out of the folder: give a path within it")
    return parts


def _named(path: str) -> list[str]:
    parts = _parts(path)
    if not parts:
        raise ToolError(f"{path!r:.200} names no file")
    return parts
