from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256

import pyarrow.parquet as pq
import pytest
from tests.viewer.made_runs import NASTY

from rollfeed.cli.main import main
from rollfeed.errors import RunDirectoryError
from rollfeed.store import RunReader
from rollfeed.viewer import find_runs, write_report


def held(text: str) -> dict:
    (content,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', text, re.DOTALL)
    return json.loads(content)


def test_a_small_run_is_in_the_file_whole(make_run, tmp_path, capsys) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(make_run()), "--out", str(out)]) == 0
    assert re.search(r"report.html: 0.\d MB, 24 samples of 24\n", capsys.readouterr().out)
    content = held(out.read_text())
    assert content["overviews"]["run"]["steps"]["step"] == [0, 1, 2]
    assert len(content["stored"]["run"]["rows"]) == 24
    assert content["stored"]["run"]["samples"]["1.5.0.50"]["drop_reason"] == "zero_std_0.0"


def test_texts_of_a_run_cannot_leave_the_data(make_run, tmp_path) -> None:
    out = tmp_path / "report.html"
    write_report(find_runs([make_run(num_steps=1)]), out)
    text = out.read_text()
    assert text.count("<script") == text.count("</script>") == 2
    assert "<!--" not in text
    assert "<img" not in text
    assert held(text)["stored"]["run"]["samples"]["0.0.0.0"]["extracted"] == NASTY


def test_the_file_names_what_it_runs_and_asks_nobody(make_run, tmp_path) -> None:
    out = tmp_path / "report.html"
    write_report(find_runs([make_run(num_steps=1)]), out)
    text = out.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    code = re.search(r"</script>\n<script>(.*)</script>", text, re.DOTALL)[1]
    assert f"script-src 'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"(src|href)=\"", text)


def test_a_file_has_what_there_is_room_for_and_says_the_rest(make_run, tmp_path) -> None:
    out, runs = tmp_path / "report.html", find_runs([make_run(num_steps=4, num_tokens=400)])
    write_report(runs, out)
    most = out.stat().st_size - 100_000
    num_shown, num_all = write_report(runs, out, most_bytes=most)
    assert out.stat().st_size <= most
    assert num_all == 32
    assert 4 <= num_shown < 32
    content = held(out.read_text())
    assert (content["num_shown"], content["num_all"]) == (num_shown, num_all)
    rows = content["stored"]["run"]["rows"]
    assert {row["step"] for row in rows} == {0, 1, 2, 3}
    assert {0.0, 1.0} <= {row["reward"] for row in rows}


def test_a_file_that_cannot_be_written_is_one_line(make_run, tmp_path, capsys) -> None:
    run = str(make_run(num_steps=1))
    assert main(["report", run, "--out", "/dev/full"]) == 1
    assert "/dev/full: cannot be written: No space left on device; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(("out", "told"), [("gone/x.html", "gone is not a directory"), ("runs", "is a directory")])
def test_a_file_that_cannot_be_is_told_before_a_run_is_read(make_run, tmp_path, capsys, out, told) -> None:
    run = make_run(num_steps=1)
    (run / "steps.jsonl").unlink()
    assert main(["report", str(run), "--out", str(tmp_path / out)]) == 2
    assert f"{told}; name a file" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys) -> None:
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 2
    assert "has no run and no evaluation in it" in capsys.readouterr().err


def test_of_several_runs_one_that_is_damaged_says_so(make_run, tmp_path) -> None:
    damaged, whole = make_run("damaged"), make_run("whole")
    (damaged / "batches" / "step-000001.parquet").unlink()
    (whole.parent / "scores").mkdir()
    (whole.parent / "scores" / "eval.json").write_text('{"sets": 3')
    out = tmp_path / "report.html"
    assert write_report(find_runs([whole.parent]), out)[0] == 24
    problems = {line["name"]: line.get("problem", "") for line in held(out.read_text())["runs"]}
    assert "step-000001.parquet: is missing" in problems["damaged"]
    assert "eval.json: cannot be read" in problems["scores"]
    assert problems["whole"] == ""
    with pytest.raises(RunDirectoryError, match="is missing"):
        write_report(find_runs([damaged]), out)


def test_a_step_whose_texts_alone_are_damaged_leaves_the_other_runs(make_run, tmp_path, monkeypatch) -> None:
    damaged, whole = make_run("damaged"), make_run("whole")
    path = damaged / "batches" / "step-000001.parquet"
    column = pq.read_metadata(path).row_group(0).column(pq.read_metadata(path).schema.names.index("element"))
    content = bytearray(path.read_bytes())
    start = column.data_page_offset
    content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(content)
    out = tmp_path / "report.html"
    write_report(find_runs([whole.parent]), out)
    content = held(out.read_text())
    problems = {line["name"]: line.get("problem", "") for line in content["runs"]}
    assert "step-000001.parquet: is damaged" in problems["damaged"]
    assert len(content["stored"]["whole"]["samples"]) == 24
    with pytest.raises(RunDirectoryError, match="is damaged"):
        write_report(find_runs([damaged]), out)


def test_the_groups_of_a_step_are_read_at_once(make_run, tmp_path, monkeypatch) -> None:
    asked = []
    group_rows = RunReader.group_rows

    def counted(self: RunReader, *groups: int, step: int) -> object:
        asked.append(step)
        return group_rows(self, *groups, step=step)

    monkeypatch.setattr(RunReader, "group_rows", counted)
    assert write_report(find_runs([make_run()]), tmp_path / "report.html") == (24, 24)
    assert asked == [2, 1, 0]


@pytest.mark.parametrize("text", ["naïve 日本 🙂 \ufffd", "plain"])
def test_characters_of_several_tokens_are_one_text(tiny_checkpoint, text) -> None:
    from rollfeed.prompts import load_tokenizer
    from rollfeed.viewer.token_texts import TokenTexts

    tokenizer = load_tokenizer(tiny_checkpoint)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    texts = TokenTexts(tokenizer).texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text
