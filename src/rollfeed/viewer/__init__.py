"""The page on runs: served on loopback, or one file."""

from rollfeed.viewer.found_runs import find_runs
from rollfeed.viewer.one_file import write_report
from rollfeed.viewer.view_server import LOOPBACK, ViewServer

__all__ = ["LOOPBACK", "ViewServer", "find_runs", "write_report"]
