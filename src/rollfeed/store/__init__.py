"""The run directory: what a run keeps, and how it is read again."""

from rollfeed.store.journal import RunRecord, RunStatus
from rollfeed.store.reader import FoundGroup, GroupSummary, MemberSummary, RunReader, question_of
from rollfeed.store.run_directory import Rewind, RunDirectory
from rollfeed.store.step_log import StepRecord

__all__ = [
    "FoundGroup",
    "GroupSummary",
    "MemberSummary",
    "Rewind",
    "RunDirectory",
    "RunReader",
    "RunRecord",
    "RunStatus",
    "StepRecord",
    "question_of",
]
