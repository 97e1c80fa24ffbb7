"""Runs whose prompts have pictures: what is stored of these, and what stops a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from tests.engine.pictures.seeing import png

from rollfeed import app
from rollfeed.config import RunSpec, validate_settings
from rollfeed.errors import ConfigError, DataError, PictureMismatchError
from rollfeed.store import RunReader
from rollfeed.types import SeenPicture
from rollfeed.viewer.token_texts import RunTokenizers
from rollfeed.viewer.whole_sample import whole_sample

TEXT = {"checkpoint": "tiny", "tiny": {"characters": "red?<imag>"}}
TINY = {"characters": "?#\n", "words": ["red", "green"], "num_heads": 2}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunSpec]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(rows: list[dict[str, Any]], *, model: Any = None, **sections: Any) -> RunSpec:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = {"path": "train.jsonl", "label_key": "label", "image_key": "image"}
        tree = {
            "model": model or {"checkpoint": "tiny-vision", "tiny": TINY},
            "prompts": {"datasets": [dataset | sections.pop("dataset", {})]},
            "rollout": {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 8},
            "sampling": {"rollout_max_response_len": 2},
            "engine": {"context_length": 64, "num_slots": 8, "threads": 1},
            "reward": {"rm_type": "exact"},
            **sections,
        }
        return RunSpec(validate_settings(tree, where="test", overrides=()), (tmp_path,))

    return make


def run(spec: RunSpec, out: Path, **how: Any) -> None:
    asyncio.run(app.run(app.prepare(spec, out=out), out=out, **how))


def test_a_picture_is_stored_once_however_many_samples_have_it(spec, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "same.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(png(2))
    rows = [{"prompt": "<image>red?", "label": "red", "image": name} for name in ("a.png", "same.png", "b.png")]
    out = tmp_path / "run"
    run(spec(rows), out)
    files = {path.name: path.read_bytes() for path in (out / "pictures").iterdir()}
    assert sorted(files.values()) == sorted([png(1), png(2)])
    # None of the files of the steps has them again.
    table = parquet.read_table(out / "batches" / "step-000001.parquet")
    assert len(table) == 16
    assert {each[0]["content_hash"] for each in table["images"].to_pylist()} <= {name[:64] for name in files}
    (tmp_path / "a.png").unlink()  # a run is read without the files that it was made of
    with RunReader(out) as reader:
        (sample, *_) = reader.batch(0).samples
    shown = whole_sample(out, f"0.{sample.group_index}.0.{sample.index}", RunTokenizers())
    assert shown["pictures"][0]["source"] == "a.png"
    assert shown["pictures"][0]["shown"].startswith("data:image/png;base64,")
    # The names of files come from the run, and what they lead to is shown only where it is what they are called by.
    (out / "pictures" / f"{sample.images[0].content_hash}.png").write_bytes(png(3))
    other = whole_sample(out, f"0.{sample.group_index}.0.{sample.index}", RunTokenizers())
    assert other["pictures"][0]["shown"] is None


def test_what_waits_for_a_resumed_run_has_its_pictures(spec, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    row = {"prompt": "<image>red?", "label": "red", "image": "a.png"}
    out = tmp_path / "run"
    run(spec([row]), out)
    before = [path.stat().st_mtime_ns for path in (out / "pictures").iterdir()]
    run(spec([row]), out, step=0)
    assert [path.stat().st_mtime_ns for path in (out / "pictures").iterdir()] == before


def test_an_engine_that_has_seen_another_picture_stops_the_run(spec, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    prepared = app.prepare(spec([{"prompt": "<image>red?", "label": "red", "image": "a.png"}]))
    look = prepared.engine.look

    async def looking_elsewhere(token_ids: Any, images: Any) -> Any:
        found = await look(token_ids, images)
        return found._replace(seen=tuple(SeenPicture("0" * 64, each.start, each.end) for each in found.seen))

    prepared.engine.look = looking_elsewhere
    with pytest.raises(PictureMismatchError, match=r"picture 1, a\.png: the engine has seen 000000000000\.\.\., and"):
        asyncio.run(app.run(prepared, out=tmp_path / "run"))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("none.png", r"train\.jsonl:2: picture none\.png: there is no such file"),
        ("broken.png", r"train\.jsonl:2: picture broken\.png: it is broken"),
        ("text.png", r"train\.jsonl:2: picture text\.png: it is no picture in PNG"),
        (["a.png", "a.png"], r"train\.jsonl:2: 2 images and 1 places for them"),
    ],
)
def test_a_picture_that_cannot_be_used_is_named_with_its_row(spec, tmp_path: Path, image, message) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "broken.png").write_bytes(png(2, (64, 64))[:2000])
    (tmp_path / "text.png").write_text("no picture")
    good = {"prompt": "<image>red?", "label": "red", "image": "a.png"}
    bad = {**good, "image": image}
    with pytest.raises(DataError, match=message):
        app.prepare(spec([good, bad]), starts=False)


def test_a_model_that_reads_text_takes_no_pictures(spec, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    row = {"prompt": "<image>red?", "label": "red", "image": "a.png"}
    with pytest.raises(ConfigError, match="train/0 has images, and"):
        app.prepare(spec([row], model=TEXT, dataset={"apply_chat_template": False}), starts=False)
