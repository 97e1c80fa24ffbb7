"""The log of a run: all that is logged while it goes on, and a run that goes on whatever happens to the file."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollfeed import logs
from rollfeed.logs import RUN_LOGS, EarlyRecords, progress, run_log

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (?P<level>[A-Z]+) (?P<name>\S+): (?P<message>.*)")
OURS = logging.getLogger("rollfeed")


@contextmanager
def process_of_its_own() -> Iterator[None]:
    """Without the handlers of the tests' runner, which come and go with each phase."""
    root = logging.getLogger()
    before = root.handlers, OURS.handlers, OURS.level
    root.handlers, OURS.handlers = [], []
    OURS.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers, OURS.handlers = before[:2]
        OURS.setLevel(before[2])


def lines(folder: Path) -> list[tuple[str, str, str]]:
    found = [LINE.fullmatch(line) for line in (folder / "run.log").read_text().splitlines()]
    assert all(found)
    return [(match["level"], match["name"], match["message"]) for match in found if match]


@process_of_its_own()
def test_what_is_logged_is_there_with_time_and_level_whoever_logs_it(tmp_path: Path) -> None:
    early = EarlyRecords()
    OURS.addHandler(early)
    logging.getLogger("rollfeed.app").warning("before there is a %s", "directory")
    with run_log(tmp_path):
        logging.getLogger("rollfeed.store").info("a step")
        logging.getLogger("rollfeed.store").debug("too much")
        logging.getLogger("somebody").error("half a pair: \ud800")
        progress.info("only here")
    logging.getLogger("rollfeed.store").info("after it")
    assert lines(tmp_path) == [
        ("WARNING", "rollfeed.app", "before there is a directory"),
        ("INFO", "rollfeed.store", "a step"),
        ("ERROR", "somebody", "half a pair: \\ud800"),
        ("INFO", "rollfeed.progress", "only here"),
    ]
    with run_log(tmp_path):
        progress.info("gone on with")
    assert [message for _, _, message in lines(tmp_path)][-2:] == ["only here", "gone on with"]
    assert logging.getLogger().handlers == []


@process_of_its_own()
def test_a_terminal_shows_what_it_shows_without_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def all_kinds() -> str:
        logging.getLogger("somebody").warning("a warning of others")
        logging.getLogger("somebody").info("nothing")
        logging.getLogger("rollfeed.store").warning("one of ours")
        progress.error("only in the file")
        return capsys.readouterr().err

    without = all_kinds()
    with run_log(tmp_path):
        assert all_kinds() == without == "a warning of others\none of ours\n"
        OURS.addHandler(logging.NullHandler())
        assert all_kinds() == "a warning of others\n"


def test_the_file_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_BYTES", 1000)
    with run_log(tmp_path):
        for number in range(100):
            progress.info("line %d", number)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(RUN_LOGS)
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert lines(tmp_path)[-1][2] == "line 99"


def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").mkdir()
    with run_log(tmp_path):
        progress.info("one")
        progress.info("two")
    told = capsys.readouterr().err
    assert told == f"{tmp_path / 'run.log'}: cannot be written: Is a directory; the run goes on without it\n"


@pytest.mark.parametrize("argument", ["three", ValueError])
def test_a_record_that_its_caller_got_wrong_is_there_and_the_file_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argument: object
) -> None:
    monkeypatch.setattr(progress, "handlers", [])  # the tests' runner has some, which raise
    with run_log(tmp_path):
        progress.info("%d rows", argument)
        progress.info("two")
    first, second = (tmp_path / "run.log").read_text().splitlines()
    assert first.endswith("INFO rollfeed.progress: %d rows (its arguments do not fit: TypeError)")
    assert second.endswith("INFO rollfeed.progress: two")
    assert capsys.readouterr().err == ""


def test_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logs, "RUN_LOG", "full")
    with run_log(Path("/dev")):
        for _ in range(3):
            progress.info("x")
    assert capsys.readouterr().err.count("No space left on device") == 1
