"""From what a data set, a message or a caller gives as a picture or a video to pictures whose bytes are kept."""

from __future__ import annotations

import base64
import binascii
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from rollfeed.config.pictures import PictureSettings
from rollfeed.errors import ConfigError
from rollfeed.prompts.pictures.decoding import (
    as_png,
    check_size,
    chosen_frames,
    decoded,
    frames_of,
    import_pil,
)
from rollfeed.prompts.pictures.fetching import Fetcher
from rollfeed.protocols import PictureStore
from rollfeed.types import Picture, PictureKind

_MOST_SHOWN = 100
_PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_ANIMATIONS = (".gif", ".webp", ".png", ".apng", ".tif", ".tiff")


class PictureLoader:
    """Loads pictures, and keeps their bytes in a store; fits :class:`rollfeed.protocols.PictureLoading`.

    A file is read and a URL fetched once, however many rows show it.
    """

    def __init__(
        self, store: PictureStore, *, limits: PictureSettings | None = None, fetcher: Fetcher | None = None
    ) -> None:
        self._store = store
        self._limits = limits or PictureSettings()
        self._fetcher = fetcher or Fetcher(
            max_bytes=self._limits.max_bytes, timeout_seconds=self._limits.timeout_seconds
        )
        self._known: dict[tuple[str, int, int], Picture] = {}
        """By path, size and time of a file, or by URL."""
        self._lock = threading.Lock()

    def load(self, given: Any, *, folder: Path | None = None) -> Picture:
        """Return a picture; as :meth:`rollfeed.protocols.PictureLoading.load`."""
        given = _inner(given)
        try:
            if isinstance(given, str):
                return self._named(given, folder)
            if isinstance(given, bytes):
                return self._kept(*decoded(self._bounded(given), limits=self._limits, source="data:"))
            if hasattr(given, "convert") and hasattr(given, "size"):
                check_size(given.size, self._limits)
                return self._kept(*as_png(given, source="data:"))
        except ConfigError:
            raise
        except ValueError as error:
            raise ValueError(f"picture {_shown(given)}: {error}") from None
        raise ValueError(f"a picture must be a path, a URL, a data URI or bytes, is a {type(given).__name__}")

    def load_video(self, given: Any, *, folder: Path | None = None) -> tuple[Picture, ...]:
        """Return frames of a video; as :meth:`rollfeed.protocols.PictureLoading.load_video`."""
        given = _inner(given)
        if isinstance(given, list | tuple):
            if not given:
                raise ValueError("a video has no frames")
            chosen = [given[index] for index in chosen_frames(len(given), self._limits.video_frames)]
            return tuple(_as_frame(self.load(each, folder=folder)) for each in chosen)
        try:
            frames = tuple(self._kept(*each) for each in self._frames(given, folder))
        except ConfigError:
            raise
        except ValueError as error:
            raise ValueError(f"video {_shown(given)}: {error}") from None
        return frames

    def _frames(self, given: Any, folder: Path | None) -> Iterator[tuple[Picture, bytes]]:
        source = given if isinstance(given, str) else "data:"
        path = None
        if isinstance(given, str) and not _is_remote(given):
            path = _path(given, folder)
            if path.is_dir():
                files = sorted(each for each in path.iterdir() if each.suffix.lower() in _PICTURE_ENDINGS)
                if not files:
                    raise ValueError("it is a folder without pictures")
                for index in chosen_frames(len(files), self._limits.video_frames):
                    picture, content = decoded(self._read(files[index]), limits=self._limits, source=str(files[index]))
                    yield _as_frame(picture), content
                return
        content = self._bounded(given) if isinstance(given, bytes) else self._content(given, path)
        if path is not None and path.suffix.lower() not in _ANIMATIONS:
            yield from _frames_by_pyav(path, self._limits)
        else:
            yield from frames_of(content, limits=self._limits, source=_shown(source))

    def _named(self, given: str, folder: Path | None) -> Picture:
        path, key = None, (given, -1, -1)
        if not _is_remote(given):
            path = _path(given, folder)
            status = _status(path)
            key = (str(path), status.st_size, status.st_mtime_ns)
        with self._lock:
            known = self._known.get(key)
        if known is not None and self._store.has(known):
            return replace(known, source=_shown(given))
        content = self._content(given, path)
        picture, sent = decoded(content, limits=self._limits, source=_shown(given))
        self._store.put(picture, sent, origin=path if sent is content else None)
        if not given.startswith("data:"):
            with self._lock:
                self._known[key] = picture
        return picture

    def _content(self, given: Any, path: Path | None) -> bytes:
        if path is not None:
            return self._read(path)
        if not isinstance(given, str):
            raise ValueError(f"it must be a path, a URL, a data URI, bytes or a list of pictures, is {type(given)}")
        return self._bounded(_data_of(given)) if given.startswith("data:") else self._fetcher.fetch(given)

    def _read(self, path: Path) -> bytes:
        status = _status(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no file")
        if status.st_size > self._limits.max_bytes:
            raise ValueError(_too_large(status.st_size, self._limits))
        try:
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"it cannot be read: {error}") from None

    def _bounded(self, content: bytes) -> bytes:
        if len(content) > self._limits.max_bytes:
            raise ValueError(_too_large(len(content), self._limits))
        return content

    def _kept(self, picture: Picture, content: bytes) -> Picture:
        return self._store.put(picture, content)


def _inner(given: Any) -> Any:
    """Return what a mapping or a part of a message holds, in the forms of data sets and of chat APIs."""
    for _ in range(3):  # {"type": "image_url", "image_url": {"url": ...}}
        if not isinstance(given, Mapping):
            return given
        names = ("bytes", "image", "image_url", "url", "source", "data", "video", "path")
        found = next((name for name in names if given.get(name) is not None), None)
        if found is None:
            raise ValueError("a picture without a path, url or bytes")
        if found == "data" and isinstance(given["data"], str):
            return f"data:{given.get('media_type', 'image/png')};base64,{given['data']}"
        given = given[found]
    return given


def _as_frame(picture: Picture) -> Picture:
    return replace(picture, kind=PictureKind.FRAME)


def _is_remote(given: str) -> bool:
    return given.startswith(("http://", "https://", "data:"))


def _path(given: str, folder: Path | None) -> Path:
    if folder is None:
        raise ValueError("a path is not taken here: give a URL or a data URI")
    return folder / given.removeprefix("file://")


def _status(path: Path) -> Any:
    try:
        return path.stat()
    except (OSError, ValueError) as error:
        problem = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error}"
        raise ValueError(problem) from None


def _data_of(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    if not comma:
        raise ValueError("it is no data URI: data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"its base64 cannot be read: {error}") from None


def _shown(given: Any) -> str:
    """Return what a picture is called in messages and records."""
    if not isinstance(given, str) or given.startswith("data:"):
        return "data:"
    if _is_remote(given):  # users, passwords and signatures are nobody else's
        given = re.sub("^(https?://)[^/?#]*@", r"\1", given).partition("#")[0]
        given = given if "?" not in given else f"{given.partition('?')[0]}?..."
    return given if len(given) <= _MOST_SHOWN else f"{given[:_MOST_SHOWN]}..."


def _too_large(size: int, limits: PictureSettings) -> str:
    return f"it has {size:,} bytes, more than prompts.pictures.max_megabytes = {limits.max_megabytes:g}"


def _frames_by_pyav(path: Path, limits: PictureSettings) -> Iterator[tuple[Picture, bytes]]:
    """Yield frames of a video file."""
    import_pil()
    try:
        import av  # type: ignore[import-not-found]  # nobody needs it but for files of videos
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path}: video files need PyAV, which is not installed: pip install av, or give a folder of frames"
        ) from None
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            total = stream.frames or sum(1 for _ in container.decode(stream))
            wanted = set(chosen_frames(total, limits.video_frames))
            container.seek(0)
            for index, frame in enumerate(container.decode(stream)):
                if index in wanted:
                    check_size((frame.width, frame.height), limits)
                    yield as_png(frame.to_image(), kind=PictureKind.FRAME, source=f"{path}#{index}")
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"it cannot be decoded: {error}") from None
