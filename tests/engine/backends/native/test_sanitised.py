"""The kernels touch no memory that is not theirs, by the compiler's sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollfeed

DRIVER = Path(__file__).with_name("sanitised.py")
SECONDS = float(os.environ.get("ROLLFEED_FUZZ_SECONDS", "120"))


def sanitizer_library() -> str | None:
    """The library to be loaded before everything else; None where gcc has none."""
    if shutil.which("gcc") is None:
        return None
    told = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    return told.strip() if os.path.isabs(told.strip()) else None


def run_driver(folder: Path, *, seconds: float, seed: int = 0) -> subprocess.CompletedProcess[str]:
    preload = sanitizer_library()
    if preload is None:
        pytest.skip("there is no gcc with an address sanitizer here")
    options = "detect_leaks=0:abort_on_error=0:exitcode=1:allocator_may_return_null=1"
    environment = {
        **os.environ,
        "CC": "gcc",
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(Path(rollfeed.__file__).parents[1]),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, str(DRIVER), str(folder), str(seconds), str(seed)]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
def test_random_models_make_the_sanitizers_say_nothing(tmp_path: Path) -> None:
    ended = run_driver(tmp_path, seconds=SECONDS)
    assert ended.returncode == 0, ended.stdout[-200:] + ended.stderr[-6000:]
    assert "ERROR" not in ended.stderr
    assert "runtime error" not in ended.stderr
    assert ended.stdout.rstrip().endswith("models without a finding")
