"""Compiles the C sources once a machine, and declares what they offer.

The shared library is kept in the user's cache directory under a name made of the sources, the
compiler, its flags and the processor, so a new version of any of them is compiled anew. Before it is
loaded it is compared with its digest, and must be a file that nobody else can have written.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from ctypes import POINTER, c_bool, c_double, c_float, c_int, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from pathlib import Path

from rollfeed.base.atomic import digest_of, replace_file, sync, user_cache

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-std=gnu11",
    "-O3",
    # Products and sums are fused, but never reordered: a row's bits may not depend on how a loop is cut.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    "-pthread",
)
_COMPILE_SECONDS = 120
_MACHINES = ("x86_64", "amd64", "aarch64", "arm64")


class NativeUnavailableError(Exception):
    """This machine cannot compile or load the kernels; the text says why."""


class Sizes(ctypes.Structure):
    """``rf_sizes`` of csrc/model.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "num_slots",
                "capacity",
                "max_rows",
            )
        ),
        ("rms_norm_eps", c_float),
        ("quantised", c_int32),
    )


_FLOATS, _INTS = POINTER(c_float), POINTER(c_int32)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "rf_model_new": (c_void_p, (POINTER(Sizes), c_int)),
    "rf_model_free": (None, (c_void_p,)),
    "rf_model_set_threads": (c_bool, (c_void_p, c_int)),
    "rf_model_matrix": (c_void_p, (c_void_p, c_int, c_int)),
    "rf_model_norm": (_FLOATS, (c_void_p, c_int, c_int, c_int)),
    "rf_model_embedding": (_FLOATS, (c_void_p,)),
    "rf_model_rotary": (_FLOATS, (c_void_p, c_bool)),
    "rf_model_nanoseconds": (POINTER(c_int64), (c_void_p,)),
    "rf_logits_stride": (c_int, (c_void_p,)),
    "rf_matrix_bias": (_FLOATS, (c_void_p,)),
    "rf_matrix_write": (None, (c_void_p, c_int, c_int, _FLOATS)),
    "rf_matrix_read": (None, (c_void_p, c_int, c_int, _FLOATS)),
    "rf_forward": (None, (c_void_p, c_int, _INTS, _INTS, _INTS, _FLOATS)),
    "rf_logits": (None, (c_void_p, c_int, _FLOATS, _FLOATS)),
    "rf_sample": (
        None,
        (
            *(c_void_p, c_int, _FLOATS, c_int, _FLOATS, POINTER(c_int64), POINTER(c_double), POINTER(c_double)),
            *(POINTER(c_int64), _FLOATS, POINTER(c_uint8)),
        ),
    ),
    "rf_copy_positions": (None, (c_void_p, c_int, c_int, c_int, c_int)),
    "rf_erase_slot": (None, (c_void_p, c_int)),
}


@cache
def load_library() -> ctypes.CDLL:
    """Return the compiled kernels, compiling them when they are not in the cache (a few seconds).

    Raises:
        NativeUnavailableError: If there is no C compiler, or it or its result does not work here.
    """
    if platform.machine().lower() not in _MACHINES or sys.platform not in ("linux", "darwin"):
        raise NativeUnavailableError(f"not written for {platform.machine()} on {sys.platform}")
    path = _compiled(_compiler())
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{path}: {error}") from error
    return library


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NativeUnavailableError("no C compiler (cc, gcc or clang) on the PATH")


def _compiled(compiler: str) -> Path:
    """Return the shared library, made if need be; several processes may do so at once."""
    tuned = "-mcpu=native" if platform.machine().lower() in ("aarch64", "arm64") else "-march=native"
    command = [compiler, *_FLAGS, tuned, str(_SOURCES / "rollfeed.c"), "-lm"]
    name, folder = f"kernels-{_key(command)}.so", user_cache("kernels")
    if _is_trusted(folder / name):
        return folder / name
    try:
        library = _own(folder) / name
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            subprocess.run(
                [*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS
            )
            made.chmod(0o755)
            sync(made)
            replace_file(_digest_file(library), lambda file: file.write(digest_of(made).sha256.encode()))
            made.replace(library)
            sync(library.parent)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise NativeUnavailableError(f"{compiler} does not compile the kernels ({lines[0]})") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"the kernels cannot be compiled ({error})") from error
    return library


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_trusted(library: Path) -> bool:
    """Whether a library is whole and our own: one that is cut short ends the process when it is loaded."""
    digest = _digest_file(library)
    try:
        is_ours = not any(map(_is_foreign, (library.parent, library, digest)))
        return is_ours and digest.read_bytes() == digest_of(library).sha256.encode()
    except OSError:
        return False


def _own(folder: Path) -> Path:
    """Return the cache's folder, for us alone; where it is somebody else's, one that goes with this process."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink():
        folder.chmod(0o700)
        return folder
    temporary = Path(tempfile.mkdtemp(prefix="rollfeed-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _is_foreign(path: Path) -> bool:
    """Whether somebody else can have written a file or folder. Raises OSError."""
    found = path.lstat()
    is_plain = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return not is_plain or found.st_uid != os.geteuid() or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _key(command: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(repr((command, os.stat(command[0]).st_mtime_ns, _processor())).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return what tells processors with different instructions apart, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    known = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(known)}))
