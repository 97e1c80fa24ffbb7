"""The run directory: what a run keeps, and how it is read again."""

from rollfeed.store.codec import (
    decode_draw,
    decode_group,
    decode_state,
    encode_draw,
    encode_group,
    encode_state,
)
from rollfeed.store.journal import RunRecord, RunStatus, StepRecord
from rollfeed.store.metrics_file import MetricsFile
from rollfeed.store.reader import FoundGroup, GroupSummary, MemberSummary, RunReader, RunTotals, question_of
from rollfeed.store.run_directory import RunDirectory

__all__ = [
    "FoundGroup",
    "GroupSummary",
    "MemberSummary",
    "MetricsFile",
    "RunDirectory",
    "RunReader",
    "RunRecord",
    "RunStatus",
    "RunTotals",
    "StepRecord",
    "decode_draw",
    "decode_group",
    "decode_state",
    "encode_draw",
    "encode_group",
    "encode_state",
    "question_of",
]
