"""The run directory: what a run keeps, and how it is read again."""

from rollfeed.store.codec import (
    decode_draw,
    decode_group,
    decode_state,
    encode_draw,
    encode_group,
    encode_state,
)
from rollfeed.store.journal import RunRecord, RunStatus
from rollfeed.store.reader import FoundGroup, GroupSummary, MemberSummary, RunReader, RunTotals, question_of
from rollfeed.store.run_directory import Rewind, RunDirectory
from rollfeed.store.spill import SpillFile, SpillHandle
from rollfeed.store.step_log import MetricsFile, StepRecord

__all__ = [
    "FoundGroup",
    "GroupSummary",
    "MemberSummary",
    "MetricsFile",
    "Rewind",
    "RunDirectory",
    "RunReader",
    "RunRecord",
    "RunStatus",
    "RunTotals",
    "SpillFile",
    "SpillHandle",
    "StepRecord",
    "decode_draw",
    "decode_group",
    "decode_state",
    "encode_draw",
    "encode_group",
    "encode_state",
    "question_of",
]
