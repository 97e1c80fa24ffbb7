"""Recounts a run of which nothing is believed, and takes it back to a step that is whole."""

from rollfeed.app.verifying.file_checks import file_checks
from rollfeed.app.verifying.restoring import restore_run
from rollfeed.app.verifying.verification import Recounted, Verification
from rollfeed.app.verifying.verify_run import verify_run

__all__ = ["Recounted", "Verification", "file_checks", "restore_run", "verify_run"]
