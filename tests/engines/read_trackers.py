"""Prints as JSON what trackers have of a run: ``python read_trackers.py RUN``, where they are installed.

By tracker a list of runs, each with ``name``, ``points`` (by metric the pairs of step and value), ``settings`` and
``samples`` (by table the steps). Each is read by the tracker's own library, or its own format.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from os import environ
from pathlib import Path
from typing import Any

Runs = list[dict[str, Any]]


def tensorboard(out: Path) -> Runs:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for folder in (out / "trackers/tensorboard", out / "trackers/tensorboard/eval"):
        reader = EventAccumulator(str(folder))
        reader.Reload()
        points |= {tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
        texts |= {tag: reader.Tensors(tag) for tag in reader.Tags()["tensors"]}
    settings = texts.pop("settings")[0].tensor_proto.string_val[0].decode()
    samples = {tag: [each.step for each in found] for tag, found in texts.items()}
    return [{"name": out.name, "points": points, "settings": settings, "samples": samples}]


def wandb(out: Path) -> Runs:
    runs = []
    for path in sorted(out.glob("trackers/wandb/offline-run-*/run-*.wandb")):
        points, samples = defaultdict(list), defaultdict(list)
        about: dict[str, Any] = {}
        for record in _wandb_records(path):
            if record.HasField("run"):
                about = {"name": record.run.display_name, "id": record.run.run_id, "group": record.run.run_group}
                about["settings"] = {each.key: json.loads(each.value_json) for each in record.run.config.update}
            row = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
            for name, value in row.items():
                if name.endswith("samples/_type"):
                    samples[name.removesuffix("/_type")].append(row["step"])
                else:
                    points[name].append((row["step"], value))
        runs.append({**about, "points": points, "samples": samples})
    return runs


def _wandb_records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    content, at, begun = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        begun += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(begun)
            yield record
            begun = b""


def mlflow(out: Path) -> Runs:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("rollfeed")
    assert experiment is not None
    runs = []
    for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
        number = run.info.run_id
        history = {name: client.get_metric_history(number, name) for name in run.data.metrics}
        points = {name: [(each.step, each.value) for each in found] for name, found in history.items()}
        samples = {"samples": [int(each.path[-11:-5]) for each in client.list_artifacts(number, "samples")]}
        about = {"name": run.info.run_name, "status": run.info.status, "group": run.data.tags.get("group")}
        runs.append({**about, "points": points, "settings": run.data.params, "samples": samples})
    return runs


def trackio(out: Path) -> Runs:
    with sqlite3.connect(Path(environ["TRACKIO_DIR"]) / "rollfeed.db") as database:
        configs = database.execute("select run_id, run_name, config from configs order by id").fetchall()
        rows = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
    runs = []
    for number, name, config in configs:
        points, samples = defaultdict(list), defaultdict(list)
        for _, step, metrics in (row for row in rows if row[0] == number):
            for metric, value in json.loads(metrics).items():
                if isinstance(value, dict):
                    samples[metric].append(step)
                else:
                    points[metric].append((step, value))
        settings = json.loads(config)
        about = {"name": name, "group": settings.get("_Group"), "settings": settings}
        runs.append({**about, "points": points, "samples": samples})
    return runs


if __name__ == "__main__":
    print(json.dumps({read.__name__: read(Path(sys.argv[1])) for read in (tensorboard, wandb, mlflow, trackio)}))
