"""A chat template that asks for the date is told the same one as long as a run lives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rollfeed import app
from rollfeed.config import RunSpec, Settings
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError
from rollfeed.store import RunDirectory

DATED = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ tone }} {{ messages[0].content }}"


@pytest.fixture
def make_settings(tiny_checkpoint: Path, tmp_path: Path) -> Callable[..., Settings]:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text(DATED)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "label": "1"}\n')

    def make(*overrides: str, **model: Any) -> Settings:
        tree = {
            "model": {"checkpoint": str(folder), **model},
            "prompts": {"datasets": [{"path": "data.jsonl", "label_key": "label"}]},
            "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "sampling": {"rollout_max_response_len": 2},
            "engine": {"threads": 1, "num_slots": 4, "context_length": 128},
            "reward": {"rm_type": "exact"},
        }
        return validate_settings(tree, where="test", overrides=overrides)

    return make


async def first_text(prepared: app.PreparedRun) -> str:
    (prompt,) = await prepared.source.draw(1)
    return prompt.text


async def test_a_run_is_gone_on_with_on_the_date_on_which_it_began(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    began = app.prepare(RunSpec(make_settings(template_date="2020-01-31T10:00:00"), (tmp_path,)), out=out)
    await app.run(began, out=out)
    again = app.prepare(RunSpec(make_settings("rollout.num_rollout=2"), (tmp_path,)), out=out)
    assert await first_text(again) == "2020-01-31 10:00:00  a"
    spec = app.stored_spec(out, ["rollout.num_rollout=2"])
    summary = await app.run(app.prepare(spec, out=out), out=out, step=0)
    assert summary.num_steps == 2


async def test_a_run_without_a_date_stores_the_time_of_its_beginning(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    prepared = app.prepare(RunSpec(make_settings(), (tmp_path,)), out=out)
    await app.run(prepared, out=out)
    stored = json.loads((out / "settings.json").read_text())["model"]["template_date"]
    assert abs(datetime.fromisoformat(stored) - datetime.now()) < timedelta(minutes=10)
    assert app.stored_spec(out).settings.model.template_date == stored
    again = app.prepare(RunSpec(make_settings(), (tmp_path,)), out=out)
    assert (await first_text(again)).startswith(stored.replace("T", " "))


def test_another_date_than_that_of_the_run_is_refused(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = make_settings(template_date="2020-01-31")
    stored = settings.model_dump(mode="json")
    RunDirectory.open(out, settings=stored, identity=settings.identity(), overwrite=False).close()
    with pytest.raises(ConfigError, match=r"template_date = '2021-01-31': the run in .* was begun with '2020-01-31'"):
        app.prepare(RunSpec(make_settings(template_date="2021-01-31"), (tmp_path,)), out=out)


async def test_variables_of_the_template_reach_prompts_and_evaluation(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(template_date="2020-01-31", chat_template_kwargs={"tone": "kind"})
    prepared = app.prepare(RunSpec(settings, (tmp_path,)))
    assert await first_text(prepared) == "2020-01-31 00:00:00 kind a"
    evaluation = app.prepare_evaluation(
        settings.eval.model_validate({"datasets": [{"path": "data.jsonl", "label_key": "label"}]}),
        config=prepared.settings,
        tokenizer=prepared.model.tokenizer,
        context_length=128,
        folders=[tmp_path],
    )
    assert evaluation.sets[0].prompts[0].text == "2020-01-31 00:00:00 kind a"


def test_a_template_that_asks_for_no_date_leaves_the_settings_as_they_are(
    make_settings: Callable[..., Settings], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    settings = make_settings(checkpoint=str(tiny_checkpoint))
    assert app.prepare(RunSpec(settings, (tmp_path,))).settings == settings
