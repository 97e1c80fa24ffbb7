from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.viewer.made_runs import commit_of

from rollfeed.store import RunDirectory


@pytest.fixture
def make_run(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    """Return a function that writes a run of some steps, whose model is here."""

    def make(
        name: str = "run",
        *,
        num_steps: int = 3,
        seed: int = 1,
        model: object = None,
        checkpoint: object = tiny_checkpoint,
        **of_step: object,
    ) -> Path:
        path = tmp_path / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = {"seed": seed, "model": {"checkpoint": str(checkpoint), **(model or {})}}
        with RunDirectory.open(path, settings=settings, identity={"seed": seed}, overwrite=False) as run:
            for step in range(num_steps):
                run.commit(commit_of(step, **of_step), reward_key=None)
            run.finish()
        return path

    return make
