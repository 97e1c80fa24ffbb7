from pathlib import Path

from rollfeed.store.json_text import read_records


def test_records_are_read_but_for_a_line_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "se')
    assert read_records(tmp_path / "log") == [{"step": 0}, {"step": 1}]
    assert read_records(tmp_path / "nothing") == []
