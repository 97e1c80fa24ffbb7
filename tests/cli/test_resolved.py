from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfeed.cli.main import main
from rollfeed.cli.resolved import resolved_text
from rollfeed.config import RunSpec
from rollfeed.store import RunDirectory

Write = Callable[..., Path]
FILES = sorted((Path(__file__).parents[2] / "examples").rglob("*.toml"))
EXAMPLES = [file for file in FILES if "prompts" in file.read_text(encoding="utf-8") and file.parent.name != "slurm"]
"""Those that are whole by themselves: that on Slurm is told its servers by its script."""


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: "-".join(file.parts[-2:]))
def test_the_resolved_settings_of_every_example_mean_the_same(file: Path, tmp_path: Path) -> None:
    settings = RunSpec.load(file).settings
    (tmp_path / "resolved.toml").write_text(resolved_text(settings, files=[file], overrides=[]), encoding="utf-8")
    again = RunSpec.load(tmp_path / "resolved.toml").settings
    assert again == settings
    assert again.trains == settings.trains


def test_each_value_says_where_it_was_given(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.toml"
    more.write_text("seed = 4\n[model.chat_template_kwargs]\n'a.b' = true\n")
    files = [str(settings_file()), str(more)]
    assert main(["check", *files, "--set", "engine.threads=2", "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed = 4  # more.toml" in lines
    assert "num_slots = 8  # eval.toml" in lines
    assert "threads = 2  # --set" in lines
    assert 'chat_template_kwargs = { "a.b" = true }  # more.toml' in lines
    assert 'mode = "sync"' in lines


def test_the_resolved_settings_are_also_printed_as_json(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = settings_file()
    assert main(["check", str(file), "--print", "--json"]) == 0
    tree = tmp_path / "tree.json"
    tree.write_text(capsys.readouterr().out)
    assert RunSpec.load(tree).settings == RunSpec.load(file).settings
    assert not RunSpec.load(tree).settings.trains


def test_the_settings_of_a_run_are_a_settings_file_that_finds_what_the_run_found(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec.load(settings_file())
    run = tmp_path / "elsewhere" / "run"
    tree = spec.settings.resolved()
    with RunDirectory.open(
        run, settings=tree, identity=spec.settings.identity(), overwrite=False, folders=spec.folders
    ):
        pass
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["check", str(run / "settings.json"), "--json", "--set", "seed=9"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_prompts"]["questions"]["num_prompts"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds no settings, which are one JSON object; give the settings.json of a run"),
        ("[" * 100_000, "its values are nested too deeply"),
        ("{", "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_json_without_settings_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text(text)
    assert main(["check", str(tmp_path / "settings.json")]) == 2
    assert capsys.readouterr().err == f"rollfeed: {tmp_path / 'settings.json'}: {message}\n"
