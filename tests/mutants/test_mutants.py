"""Small mistakes in the code, each a patch beside this file, are found by the tests that it names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = sorted(HERE.glob("*.patch"))


def named_by(patch: Path) -> list[str]:
    """Return what stands behind ``Tests:`` above the patch."""
    line = next(line for line in patch.read_text().splitlines() if line.startswith("Tests:"))
    return line.removeprefix("Tests:").split()


def run_tests(source: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    where = subprocess.run(
        [sys.executable, "-c", "import rollfeed; print(rollfeed.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(source), f"tested would be {where.stdout}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a copy of the package's source folder."""
    return Path(shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.soak
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_mistake_is_found_by_its_tests(patch: Path, source: Path) -> None:
    subprocess.run(["git", "apply", str(patch)], cwd=source.parent, check=True)
    result = run_tests(source, named_by(patch))
    assert result.returncode == 1, f"{patch.name} was not found by {named_by(patch)}:\n{result.stdout[-2000:]}"
    assert "FAILED" in result.stdout


@pytest.mark.soak
def test_the_same_tests_pass_without_a_mistake(source: Path) -> None:
    tests = sorted({test for patch in PATCHES for test in named_by(patch)})
    result = run_tests(source, tests)
    assert result.returncode == 0, result.stdout[-2000:]


def test_every_mistake_is_one_that_the_code_could_still_have() -> None:
    """A patch that no longer applies would find nothing."""
    for patch in PATCHES:
        subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, check=True)
