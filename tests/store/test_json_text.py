from pathlib import Path

from rollfeed.store.json_text import read_records, to_json


def test_records_are_read_but_for_a_line_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "se')
    assert read_records(tmp_path / "log") == [{"step": 0}, {"step": 1}]
    (tmp_path / "log").write_bytes('{"step": 0}\n{"step": 1, "é'.encode()[:-1])
    assert read_records(tmp_path / "log") == [{"step": 0}]
    assert read_records(tmp_path / "nothing") == []


def test_a_record_ends_at_its_line_break_only(tmp_path: Path) -> None:
    record = {"sets": {"a\u2028b\x85c": 1}}
    (tmp_path / "log").write_text(to_json(record, "a record") + "\n", encoding="utf-8")
    assert read_records(tmp_path / "log") == [record]
