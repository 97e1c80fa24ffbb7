"""The run directory: what a run keeps, and how it is read again."""

from rollfeed.store.journal import RunStatus
from rollfeed.store.reader import FoundGroup, RunReader
from rollfeed.store.run_directory import Rewind, RunDirectory
from rollfeed.store.step_log import StepRecord
from rollfeed.store.tables.summaries import GroupSummary, MemberSummary, question_of

__all__ = [
    "FoundGroup",
    "GroupSummary",
    "MemberSummary",
    "Rewind",
    "RunDirectory",
    "RunReader",
    "RunStatus",
    "StepRecord",
    "question_of",
]
