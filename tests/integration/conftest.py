import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SETTINGS = """
seed = 5

[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"

[[prompts.environments]]
id = "core/compare_max"

[rollout]
num_rollout = {num_rollout}
rollout_batch_size = 3
n_samples_per_prompt = 2
over_sampling_batch_size = 5

[sampling]
rollout_max_response_len = 12

[engine]
threads = 1
num_slots = 8
context_length = 384
"""


class CommandResult:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def rollfeed(capfd: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Return a function that runs a command in this process."""
    from rollfeed.cli.main import main

    def run(*arguments: str | Path) -> CommandResult:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return CommandResult(code, out, err)

    return run


@pytest.fixture
def settings_file(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    """Return a function that writes a settings file over the tiny model."""

    def write(extra: str = "", *, num_rollout: int = 3, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(SETTINGS.format(checkpoint=tiny_checkpoint, num_rollout=num_rollout) + extra)
        return path

    return write
