"""Compiling the kernels, and what happens where that is not possible."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollfeed.engine.backends.native.library import NativeUnavailableError, load_library
from rollfeed.errors import ConfigError
from rollfeed.protocols import Engine


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Let the library be looked for anew, and afterwards by the other tests."""
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _fresh: None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.usefixtures("_fresh")
def test_the_kernels_are_compiled_once_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library()
    digest, made = sorted((tmp_path / "rollfeed" / "kernels").iterdir())
    assert digest.read_text() == hashlib.sha256(made.read_bytes()).hexdigest()
    before = made.stat()
    load_library.cache_clear()
    load_library()
    after = made.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def put(library: Path, content: bytes) -> None:
    """Replace a library by another file: this process has the old one in its memory."""
    mode = library.stat().st_mode
    library.unlink()
    library.write_bytes(content)
    library.chmod(mode)


def cut_short(library: Path) -> None:
    put(library, library.read_bytes()[:5000])


def flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    put(library, bytes(content))


def link(library: Path) -> None:
    library.rename(library.with_name("elsewhere"))
    library.symlink_to(library.with_name("elsewhere"))


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(
    "damage",
    [
        *(cut_short, flip, link, give_away, Path.unlink),
        lambda library: library.chmod(0o777),
        lambda library: library.with_suffix(".sha256").unlink(),
        lambda library: give_away(library.with_suffix(".sha256")),
        lambda library: library.parent.chmod(0o777),
    ],
)
def test_x43_a_kernel_that_is_not_whole_or_not_ours_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    """The compiler of this test copies what was compiled before, and notes that it was called."""
    monkeypatch.setenv("CC", str(copying_compiler(tmp_path / "cc")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library, calls = Path(load_library()._name), tmp_path / "cc.calls"
    for _ in range(2):
        load_library.cache_clear()
        load_library()
    assert calls.read_text() == "."
    damage(library)
    load_library.cache_clear()
    assert Path(load_library()._name) == library
    assert calls.read_text() == ".."
    found = library.lstat()
    assert (found.st_uid, found.st_mode & 0o7777, library.parent.stat().st_mode & 0o777) == (os.geteuid(), 0o755, 0o700)
    load_library.cache_clear()
    load_library()
    assert calls.read_text() == ".."


@pytest.mark.usefixtures("_fresh")
def test_x43_a_cache_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(copying_compiler(tmp_path / "cc")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(load_library()._name).parent
    give_away(folder)
    load_library.cache_clear()
    used = Path(load_library()._name)
    assert used.parent != folder
    assert used.parent.stat().st_uid == os.geteuid()


def copying_compiler(path: Path) -> Path:
    whole = Path(load_library()._name)
    load_library.cache_clear()
    copy = (
        "import pathlib, shutil, sys\n"
        f"shutil.copyfile({str(whole)!r}, sys.argv[sys.argv.index('-o') + 1])\n"
        f"pathlib.Path({f'{path}.calls'!r}).open('a').write('.')\n"
    )
    return program(path, copy)


@pytest.mark.usefixtures("_no_compiler")
def test_a_machine_without_a_compiler_is_told_so() -> None:
    with pytest.raises(NativeUnavailableError, match="no C compiler"):
        load_library()


@pytest.mark.usefixtures("_fresh")
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = program(tmp_path / "cc", "import sys; sys.exit('unknown option -O3\\nmore')")
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(NativeUnavailableError, match=r"unknown option -O3\)$"):
        load_library()
    assert list((tmp_path / "cache" / "rollfeed" / "kernels").iterdir()) == []


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_torch_computes_and_the_log_says_why(
    make_tiny_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_tiny_engine()
    assert "computing with torch, which is slower: no C compiler" in caplog.text


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("changes", [{"kernels": "native"}, {"precision": "int8"}])
def test_what_needs_the_kernels_is_refused_without_them(
    make_tiny_engine: Callable[..., Engine], changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="native kernels are not available: no C compiler"):
        make_tiny_engine(**changes)


def test_the_sources_compile_without_warnings(tmp_path: Path) -> None:
    import rollfeed.engine.backends.native.library as library

    source = Path(library.__file__).parent / "csrc" / "rollfeed.c"
    command = ["cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-c", str(source), "-o", str(tmp_path / "o")]
    for machine in ("native", "x86-64"):
        finished = subprocess.run([*command, f"-march={machine}"], capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
