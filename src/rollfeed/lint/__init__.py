"""Tells of anybody's samples whether what is trained was sampled: masks and turns are derived again, and compared."""

from rollfeed.lint.files import read_subjects, sample_files
from rollfeed.lint.findings import Finding, Flaw, Report, SamplePlace
from rollfeed.lint.linter import Expected, Linter
from rollfeed.lint.marks import Marks
from rollfeed.lint.rescoring import OtherModelError, Rescored, compare
from rollfeed.lint.subject import Subject

__all__ = [
    "Expected",
    "Finding",
    "Flaw",
    "Linter",
    "Marks",
    "OtherModelError",
    "Report",
    "Rescored",
    "SamplePlace",
    "Subject",
    "compare",
    "read_subjects",
    "sample_files",
]
