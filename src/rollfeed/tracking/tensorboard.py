"""TensorBoard: event files in the run directory.

Evaluations have files of their own: where a run goes back to an earlier step, the reader drops all that a folder has
from a step on, and the evaluation before that step is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rollfeed.protocols import SampleRow, TrackedRun


class TensorBoardTracker:
    """Writes scalars by their names, and settings and samples as texts."""

    def start(self, run: TrackedRun) -> str:
        self._writers = [EventFileWriter(str(run.folder)), EventFileWriter(str(run.folder / "eval"))]
        if run.went_back:
            for writer, kept in zip(self._writers, (0, 1), strict=True):
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._add(writer, step=run.first_step + kept, session_log=start)
        else:
            lines = [f"| {key} | `{json.dumps(value)}` |".replace("\n", " ") for key, value in run.settings.items()]
            self._text("settings", "\n".join(["| setting | value |", "|---|---|", *lines]), step=run.first_step)
        return "events"

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer = self._writer(next(iter(metrics), ""))
        self._add(writer, step=step, summary=summary_pb2.Summary(value=values))
        writer.flush()

    def log_samples(self, rows: Sequence[SampleRow], *, step: int, name: str) -> None:
        parts = [f"**{column}**\n\n{_indented(value)}" for row in rows for column, value in row.items()]
        self._text(name, "\n\n".join(parts), step=step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def _writer(self, name: str) -> EventFileWriter:
        return self._writers[name.startswith("eval/")]

    def _text(self, name: str, text: str, *, step: int) -> None:
        metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING,
            string_val=[text.encode("utf-8", "replace")],
            tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]),
        )
        value = summary_pb2.Summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._add(self._writer(name), step=step, summary=summary_pb2.Summary(value=[value]))

    @staticmethod
    def _add(writer: EventFileWriter, *, step: int, **event: Any) -> None:
        writer.add_event(event_pb2.Event(wall_time=time(), step=step, **event))


def _indented(value: object) -> str:
    """Return a value as Markdown shows it unchanged."""
    return "\n".join(f"    {line}" for line in str(value).splitlines())
