from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollfeed.cli.main import main

SETTINGS = """
[model]
checkpoint = "{checkpoint}"
[engine]
threads = 1
num_slots = 8
context_length = 256
[rollout]
num_rollout = {steps}
rollout_batch_size = 4
n_samples_per_prompt = 2
[sampling]
rollout_max_response_len = 4
{prompts}
"""
ADAPTIVE = '[prompts.adaptive]\nenvironment_list = ["core/copy_text", "core/compare_max"]\ninitial_difficulty = 2'


@pytest.fixture(scope="session")
def run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tiny_checkpoint, tmp_path_factory.mktemp("plotted"), ADAPTIVE, steps=5)


def run_of(checkpoint: Path, folder: Path, prompts: str, *, steps: int) -> Path:
    (folder / "run.toml").write_text(SETTINGS.format(checkpoint=checkpoint, steps=steps, prompts=prompts))
    assert main(["run", str(folder / "run.toml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


def test_a_run_is_drawn_in_all_forms(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in run.iterdir()}
    assert main(["env", "plot", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "core/copy_text: level 2, accuracy 0" in shown or "core/copy_text: level 2 -> " in shown
    assert {path.name for path in run.iterdir()} - before == {"difficulty.html", "difficulty.png"}
    assert shown.endswith(f"wrote {run / 'difficulty.html'}\nwrote {run / 'difficulty.png'}\n")


def test_points_are_those_of_the_steps(run: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "plot", str(run), "core/copy*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["core/copy_text"]
    assert [step for step, _ in found["core/copy_text"]["difficulty"]] == [1, 2, 3, 4, 5]
    assert all(0 <= value <= 1 for _, value in found["core/copy_text"]["accuracy"])
    monkeypatch.setattr("rollfeed.cli.env_plot._MOST_STATES", 3)
    assert main(["env", "plot", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step for step, _ in found["core/compare_max"]["difficulty"]] == [1, 3, 5]


def test_files_may_go_elsewhere(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "plot", str(run), "--out", str(tmp_path / "new" / "plots")]) == 0
    assert sorted(path.name for path in (tmp_path / "new" / "plots").iterdir()) == ["difficulty.html", "difficulty.png"]


def test_what_has_nothing_to_plot_is_refused(
    run: Path, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "plot", str(run), "core/copy_tex"]) == 2
    assert "'core/copy_tex': the run has no such environment; did you mean core/copy_text?" in capsys.readouterr().err
    plain = run_of(tiny_checkpoint, tmp_path, "[[prompts.environments]]\nid = 'core/copy_text'", steps=1)
    assert main(["env", "plot", str(plain)]) == 2
    assert "only runs with [prompts.adaptive] can be plotted" in capsys.readouterr().err
    assert main(["env", "plot", str(tmp_path / "nowhere")]) == 2
