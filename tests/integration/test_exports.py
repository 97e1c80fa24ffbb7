"""Models that `rollfeed train` leaves on its way: which ones stay, that of the best evaluation, and after kills."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.questions import OPTIONS, QUESTIONS

from rollfeed.app.training import exports
from rollfeed.store.layout import remove_training_files

METRIC = "eval/questions/reward_mean"
REWARD = """
def score(sample, prompt):
    if prompt.source == "questions":
        return {0: 0.25, 2: 0.75, 4: 0.5}[sample.version_spans[0].policy_version]
    return float(sample.response_token_ids.sum() % 7)
"""
EXTRA = f"""
[train]
checkpoint_interval = 100
eval_interval = 2
micro_batch_tokens = 512
export_interval = 1
num_exports_kept = 2
export_best = "{METRIC}"
"""
EXTRA += QUESTIONS.format(reward="exported_reward:score", n_samples=1)


@pytest.fixture
def settings(settings_file, tmp_path: Path) -> Path:
    (tmp_path / "exported_reward.py").write_text(REWARD)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "a question", "answer": "right"}) + "\n")
    return settings_file(EXTRA, num_rollout=4)


@pytest.fixture
def unbroken(rollfeed, settings: Path, tmp_path: Path) -> Path:
    out = tmp_path / "unbroken"
    result = rollfeed("train", settings, "--out", out, *OPTIONS)
    assert result.code == 0, result.err
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_newest_and_the_best_stay_and_are_shown_and_taken_back(rollfeed, unbroken: Path) -> None:
    made = unbroken / "exports"
    assert sorted(path.name for path in made.iterdir()) == ["best", "step-000003", "step-000004"]
    assert json.loads((made / "best" / "export.json").read_text()) == {"step": 2, METRIC: 0.75}
    assert json.loads((made / "step-000004" / "export.json").read_text()) == {"step": 4, METRIC: 0.5}
    assert weights(made / "step-000004") == weights(unbroken / "model") != weights(made / "best")
    assert weights(made / "best") != weights(made / "step-000003") != weights(unbroken / "model")
    shown = rollfeed("show", unbroken).out.replace("\n", " ")
    assert f"exports step-000003 (step 3), step-000004 (step 4, {METRIC} 0.5), best (step 2, {METRIC} 0.75)" in shown
    assert rollfeed("show", unbroken, "--json").json["exports"]["best"] == {"step": 2, METRIC: 0.75}

    tokenizer = made / "best" / "tokenizer.json"
    content = tokenizer.read_bytes()
    tokenizer.write_bytes(content.replace(b"{", b"[", 1))
    assert "exports/best/tokenizer.json: is damaged" in rollfeed("verify", unbroken).out
    tokenizer.write_bytes(content)
    assert rollfeed("verify", unbroken).code == 0
    assert rollfeed("verify", unbroken, "--restore", "1").code == 0
    assert [path.name for path in made.iterdir()] == ["best"]
    assert {path.name for path in (unbroken / "set-aside" / "1" / "exports").iterdir()} == {
        "step-000003",
        "step-000004",
    }

    (made / "notes.txt").touch()
    for folder in (made / "best", unbroken / "model"):
        (folder / "adapter").mkdir(parents=True)
        (folder / "adapter" / "adapter_config.json").touch()
    remove_training_files(unbroken)  # as --overwrite does
    assert [path.name for path in made.iterdir()] == ["notes.txt"]
    assert not (unbroken / "model").exists()


def test_what_kills_left_is_made_good(
    rollfeed, unbroken: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the checkpoint and the export of the best, within that, and between an export and the pruning."""
    out, export_model, rmtree = tmp_path / "broken", exports.export_model, shutil.rmtree

    def dies_in_the_best(trainer: Any, *, out: Path, name: str = "model", **given: Any) -> None:
        if name == "exports/best" and trainer.step == 2:
            (out / "exports" / ".step-000001.tmp").mkdir()
            (out / "exports" / ".best.tmp").mkdir()
            (out / "exports" / ".best.tmp" / "config.json").write_text("{")
            saved = sorted(path.name for path in (out / "checkpoints").iterdir())
            raise RuntimeError(f"killed in the best, behind {saved}")
        export_model(trainer, out=out, name=name, **given)

    def dies_in_pruning(path: Path, **given: Any) -> None:
        if path.name == "step-000001":
            raise RuntimeError("killed in pruning")
        rmtree(path, **given)

    def names() -> Iterator[str]:
        return (path.name for path in sorted((out / "exports").iterdir()))

    with monkeypatch.context() as broken:
        broken.setattr(exports, "export_model", dies_in_the_best)
        result = rollfeed("train", settings, "--out", out, *OPTIONS)
        assert result.code != 0
        assert "killed in the best, behind ['step-000000', 'step-000001']" in result.err
    assert [*names()] == [".best.tmp", ".step-000001.tmp", "best", "step-000001", "step-000002"]
    assert json.loads((out / "exports" / "best" / "export.json").read_text())["step"] == 0
    with monkeypatch.context() as broken:
        broken.setattr(exports.shutil, "rmtree", dies_in_pruning)
        result = rollfeed("train", settings, "--out", out, *OPTIONS)
        assert result.code != 0
        assert "killed in pruning" in result.err
    assert [*names()] == ["best", "step-000001", "step-000002", "step-000003"]
    assert json.loads((out / "exports" / "best" / "export.json").read_text())["step"] == 2
    result = rollfeed("train", settings, "--out", out, *OPTIONS)
    assert result.code == 0, result.err
    assert contents(out / "exports") == contents(unbroken / "exports")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("train.export_interval=0", "num_exports_kept has no effect with export_interval = 0"),
        ("eval.datasets=[]", "train.export_best goes by evaluations: add"),
        (
            "train.export_best=accurracy",
            f"evaluations have no such number, but accuracy, .*{METRIC}, eval/questions/pass@1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    rollfeed, settings: Path, given: str, problem: str
) -> None:
    result = rollfeed("check", settings, "--set", given)
    assert result.code == 2
    assert re.search(problem, result.err.replace("\n", " "))
