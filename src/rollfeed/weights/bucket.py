"""Checkpoints that a trainer outside puts into an object store, fetched when they are whole.

There is no renaming in a store: a file is there when it is whole, a folder when all that its index names is there.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import BESIDE_WEIGHTS, CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from rollfeed.weights.checkpoints import check_complete, version_of
from rollfeed.weights.directory import MOST_JUMP, WeightDirectory
from rollfeed.weights.home import VersionsHome

_log = logging.getLogger(__name__)

_KEPT_FOLDERS = 3
"""Here: servers may still be reading an older one."""


class WeightBucket(WeightDirectory):
    """Finds the newest complete checkpoint under a URL of fsspec, and has it in a temporary folder of this machine.

    Raises:
        ConfigError: If nothing speaks the URL's protocol.
    """

    def __init__(self, url: str, *, poll_seconds: float) -> None:
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"weights.directory = {url!r}: {error}") from error
        self._url = url
        self._home = VersionsHome()
        self._fetching = threading.Lock()
        self._told: dict[str, str] = {}
        """Why a folder was not fetched, by its name; an empty name for the store."""
        fetched = self._home.path / "fetched"
        fetched.mkdir(mode=0o755)
        super().__init__(fetched, poll_seconds=poll_seconds)

    def newest(self) -> tuple[int, Path] | None:
        with self._fetching:
            self._fetch_newest()
        return super().newest()

    def _fetch_newest(self) -> None:
        present = {version: path for path in self.path.iterdir() if (version := version_of(path.name)) is not None}
        last, problems = max(present, default=-1), dict[str, str]()
        try:
            for version, folder in self._candidates_above(last):
                name = folder.rsplit("/", 1)[-1]
                try:
                    self._fetch(folder, self.path / name)
                except CheckpointError as error:
                    problems[name] = str(error)
                    continue
                present[version] = self.path / name
                break
        except Exception as error:  # what a store's client raises is its own
            problems[""] = f"cannot be read: {type(error).__name__}: {error}"
        for name, problem in problems.items():
            if self._told.get(name) != problem:
                _log.warning("%s: not taken as weights: %s", f"{self._url}/{name}".rstrip("/"), problem)
        self._told = problems
        for version in sorted(present)[:-_KEPT_FOLDERS]:
            shutil.rmtree(present[version], ignore_errors=True)

    def _candidates_above(self, last: int) -> list[tuple[int, str]]:
        try:
            listed = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        folders = [each["name"].rstrip("/") for each in listed if each["type"] == "directory"]
        names = {folder: folder.rsplit("/", 1)[-1] for folder in folders}
        found = [
            (version, folder)
            for folder, name in names.items()
            if not name.startswith(".")
            and (version := version_of(name)) is not None
            and last < version <= max(last, 0) + MOST_JUMP
        ]
        return sorted(found, reverse=True)

    def _fetch(self, folder: str, target: Path) -> None:
        """Bring a folder here. Raises CheckpointError if it is not whole."""
        listed = self._files.ls(folder, detail=True)
        held = {each["name"].rsplit("/", 1)[-1]: each for each in listed if each["type"] == "file"}
        self._check_names(held)
        wanted = [name for name in held if any(fnmatch(name, each) for each in (*BESIDE_WEIGHTS, "*.safetensors"))]
        writing = target.with_name(f".{target.name}.fetching")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        try:
            for name in wanted:
                self._files.get_file(held[name]["name"], str(writing / name))
            check_complete(writing)
            writing.rename(target)
        finally:
            shutil.rmtree(writing, ignore_errors=True)

    def _check_names(self, held: Mapping[str, Mapping[str, Any]]) -> None:
        needed = {CONFIG_FILE, INDEX_FILE if INDEX_FILE in held else WEIGHTS_FILE}
        if INDEX_FILE in held:
            try:
                needed |= set(json.loads(self._files.cat_file(held[INDEX_FILE]["name"]))["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"{INDEX_FILE} is no index: {error!r}") from None
        if missing := sorted(needed - held.keys()):
            raise CheckpointError(f"has no {missing[0]}")

    def _state(self, newest: tuple[int, Path] | None) -> str:
        told = [f"{name or 'the store'}: {problem}" for name, problem in self._told.items()]
        return "; ".join([f"{self._url} is fetched to {super()._state(newest)}", *told])
