"""The forms in which people have their data: every one gives the same prompts."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from rollfeed.errors import DataError
from rollfeed.prompts import ChatRenderer, ColumnKeys, LoadedPrompts, load_prompts
from rollfeed.prompts.files import open_prompt_file

ROWS = [
    {"question": "2 + 2, please", "answer": "4"},
    {"question": 'a "quoted"\nsecond line', "answer": "007"},
    {"question": "Größe?", "answer": "1.10"},
]
TEXTS = [row["question"] for row in ROWS]


def write_cells(path: Path, separator: str, rows: list[dict[str, str]] = ROWS, *, encoding: str = "utf-8") -> None:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)


def write_stream(path: Path, rows: list[dict[str, Any]], *, rows_a_batch: int = 2) -> None:
    table = pa.Table.from_pylist(rows)
    with ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=rows_a_batch)


def save_as_datasets_does(folder: Path, *shards: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{len(shards):05d}.arrow" for index in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_stream(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def write(folder: Path, name: str) -> Path:
    path = folder / name
    lines = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
    match name:
        case "a.csv" | "a.tsv":
            write_cells(path, "," if name == "a.csv" else "\t")
        case "excel.csv":
            write_cells(path, ",", encoding="utf-8-sig")
        case "a.csv.gz":
            write_cells(folder / "b.csv", ",")
            path.write_bytes(gzip.compress((folder / "b.csv").read_bytes()))
        case "a.json":
            path.write_text(json.dumps(ROWS, indent=1))
        case "lines.json":
            path.write_bytes(lines)
        case "a.jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "a.jsonl.bz2":
            path.write_bytes(bz2.compress(lines))
        case "a.jsonl.zst":
            with pa.CompressedOutputStream(str(path), "zstd") as stream:
                stream.write(lines)
        case "a.parquet":
            parquet.write_table(pa.Table.from_pylist(ROWS), path)
        case "a.arrow":
            write_stream(path, ROWS)
        case "file.arrow":
            with ipc.new_file(path, pa.Table.from_pylist(ROWS).schema) as file:
                file.write_table(pa.Table.from_pylist(ROWS))
        case "saved":
            save_as_datasets_does(path, ROWS[:1], ROWS[1:])
    return path


FORMS = ["a.csv", "a.tsv", "excel.csv", "a.csv.gz", "a.json", "lines.json", "a.jsonl.gz", "a.jsonl.bz2"]
FORMS += ["a.jsonl.zst", "a.parquet", "a.arrow", "file.arrow", "saved"]

Load = Callable[..., LoadedPrompts]


@pytest.fixture
def load(renderer: ChatRenderer) -> Load:
    def load(path: Path | str, **given: Any) -> LoadedPrompts:
        names = ("input_key", "label_key", "template", "metadata_key", "metadata_columns")
        keys = {"label_key": "answer"} | {name: given.pop(name) for name in names if name in given}
        if "template" not in keys:
            keys.setdefault("input_key", "question")
        return load_prompts(str(path), renderer=renderer, apply_chat_template=False, keys=ColumnKeys(**keys), **given)

    return load


def refusal(load: Load, path: Path | str, **given: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, **given)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_prompts(load: Load, tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    loaded = load(path)
    assert [prompt.text for prompt in loaded.prompts] == TEXTS
    assert [prompt.label for prompt in loaded.prompts] == ["4", "007", "1.10"]
    assert [prompt.prompt_id for prompt in loaded.prompts] == [f"{name.split('.')[0]}/{row}" for row in range(3)]
    assert [prompt.prompt_id[-1] for prompt in load(f"{path}@[-2:]").prompts] == ["1", "2"]


def test_files_of_a_folder_and_of_a_pattern_are_one_data_set(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "math"
    folder.mkdir()
    write_cells(folder / "b.csv", ",", ROWS[1:])
    write_cells(folder / "a.csv", ",", ROWS[:1])
    (folder / "README.md").write_text("about")
    (folder / "dataset_infos.json").write_text("{}")
    for path in (folder, f"{folder}/*.csv", f"{tmp_path}/**/*.csv"):
        loaded = load(path)
        assert [prompt.text for prompt in loaded.prompts] == TEXTS
    assert [prompt.prompt_id for prompt in load(folder).prompts] == ["math/0", "math/1", "math/2"]
    assert [prompt.prompt_id for prompt in load(f"{folder}@[1:2]").prompts] == ["math/1"]
    assert "no file has such a name" in refusal(load, f"{folder}/*.tsv")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *[
            (path, "math")
            for path in ("math", "math/*.csv", "math/?.csv@[1:]", "math/*", "math/**/*.csv", "more/../math")
        ],
        *[("math/a*.csv", "a"), ("math/a.csv", "a"), ("one", "one"), ("*/a.csv", "folder"), (".", "folder")],
    ],
)
def test_a_data_set_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    folder = tmp_path / "folder"
    for file in ("math/a.csv", "math/b.csv", "one/a.csv", "more/c.txt"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_cells(folder / file, ",")
    if path == ".":
        (folder / "one" / "a.csv").unlink()
        (folder / "math" / "b.csv").unlink()
    monkeypatch.chdir(folder)
    assert open_prompt_file(path, columns=None).name == name


def test_a_split_is_chosen_where_there_are_several(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    (folder / "data").mkdir(parents=True)
    for name, rows in (("train-00000-of-00001", ROWS[:2]), ("test-00000-of-00001", ROWS[2:])):
        parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")
    assert refusal(load, folder) == f"{folder}: has the splits test, train: set split to one of them"
    assert "did you mean train?" in refusal(load, folder, split="trian")
    assert len(load(folder, split="train").prompts) == 2
    saved = tmp_path / "saved"
    save_as_datasets_does(saved / "train", ROWS[:2])
    save_as_datasets_does(saved / "heldout", ROWS[2:])
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "heldout"]}')
    assert "has the splits train, heldout" in refusal(load, saved)
    assert [prompt.text for prompt in load(saved, split="heldout").prompts] == TEXTS[2:]
    assert "this is a file: remove it" in refusal(load, write(tmp_path, "a.csv"), split="train")
    assert "this is a pattern: remove it" in refusal(load, tmp_path / "*.csv", split="train")
    alone = refusal(load, saved / "train", split="test")
    assert "split = 'test': is for folders and data sets of the hub, and this is one split that was saved" in alone


def test_files_beside_a_split_are_not_left_out_silently(load: Load, tmp_path: Path) -> None:
    write(tmp_path, "a.csv")
    write_cells(tmp_path / "a_test.csv", ",", ROWS[2:])
    assert refusal(load, tmp_path) == (
        f"{tmp_path}: has files of the split test and others, such as a.csv: set split to it, or give a pattern of "
        "what you want"
    )
    assert [prompt.text for prompt in load(tmp_path, split="test").prompts] == TEXTS[2:]
    assert len(load(f"{tmp_path}/*.csv").prompts) == 4


def test_what_is_no_object_in_an_array_is_a_bad_row(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*ROWS, 7]))
    assert refusal(load, path).startswith(f"{path}: row 3: must be a JSON object, is a int")
    assert load(path, skip_bad_rows=True).num_bad_rows == 1


def test_a_folder_of_what_does_not_belong_together_is_refused(load: Load, tmp_path: Path) -> None:
    write(tmp_path, "a.csv")
    write(tmp_path, "a.json")
    assert f"has files of several kinds, .csv, .json: say which, as {tmp_path}/*.csv" in refusal(load, tmp_path)
    for name in ("main", "socratic"):
        (tmp_path / "two" / name).mkdir(parents=True)
        write(tmp_path / "two" / name, "a.csv")
    assert "has files in several folders, main, socratic" in refusal(load, tmp_path / "two")


def test_a_data_set_of_the_hub_that_is_not_here_is_told_how_to_fetch(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(load, "openai/gsm8k/main", split="train")
    assert "hf download --repo-type dataset openai/gsm8k --local-dir data/gsm8k" in message


def test_a_data_set_of_the_hub_is_taken_from_its_cache(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "datasets--org--sums" / "snapshots" / "abc"
    (snapshot / "main").mkdir(parents=True)
    (snapshot / ".." / ".." / "refs").mkdir()
    (snapshot / ".." / ".." / "refs" / "main").write_text("abc")
    write(snapshot / "main", "a.csv")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("org/sums", "org/sums/main"):
        assert [prompt.text for prompt in load(name).prompts] == TEXTS


@pytest.mark.parametrize(
    ("name", "fetched"), [("org/sums", ["main/a.csv", "other/a.csv"]), ("org/sums/main", ["main/a.csv"])]
)
def test_of_a_data_set_of_the_hub_only_the_folder_is_fetched(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fetched: list[str]
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    def fetch(repo: str, *, repo_type: str, allow_patterns: list[str]) -> str:
        files = ["main/a.csv", "other/a.csv", "main/image.png"]
        assert list(filter_repo_objects(files, allow_patterns=allow_patterns)) == fetched
        (tmp_path / "main").mkdir()
        write(tmp_path / "main", "a.csv")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert [prompt.text for prompt in load(name).prompts] == TEXTS


def test_ragged_rows_are_told_with_their_line_and_may_be_skipped(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"two\nlines",1\na, b,2\n\nc,3\nd\n')
    message = refusal(load, path)
    assert message.startswith(f"{path}:4: has 3 values, and the first line names 2 columns: put a text with a comma")
    loaded = load(path, skip_bad_rows=True)
    assert [prompt.text for prompt in loaded.prompts] == ["two\nlines", "c"]
    assert loaded.num_bad_rows == 2


def test_a_row_in_another_encoding_is_told_with_its_line(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("question,answer\nGröße,1\n".encode() + "Größe,2\nwho,3\n".encode("latin-1"))
    assert refusal(load, path).startswith(f"{path}:3: is not UTF-8: save the whole file as UTF-8")
    assert [prompt.label for prompt in load(path, skip_bad_rows=True).prompts] == ["1", "3"]
    path.write_bytes("question,answer\nwho,1\n".encode("utf-16"))
    assert "is UTF-16 or UTF-32 text" in refusal(load, path)
    path.write_bytes("Größe,answer\nwho,1\n".encode("latin-1"))
    assert f"{path}:1: is not UTF-8" in refusal(load, path)


def test_a_file_of_cells_without_names_says_so(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("2 + 2?,4\n3 + 3?,6\n")
    message = refusal(load, path)
    assert "input_key = 'question': no such column; its first line, which names the columns, has 2 + 2?, 4" in message
    path.write_text("a,a\n1,2\n")
    assert "has 'a' twice: rename one" in refusal(load, path)
    path.write_text("question;answer\n1;2\n")
    assert "its columns are separated by ';': save it with commas" in refusal(load, path)
    path.write_text("question,answer\n")
    assert "is empty" in refusal(load, path)
    path.write_text('question,answer\n"a"b,1\n')
    assert f"{path}:2: cannot be split into values" in refusal(load, path)
    path.write_text("question,answer\n,1\n")
    assert "column 'question' (input_key) is null" in refusal(load, path)


def test_a_file_is_checked_before_its_columns(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    assert "cannot be read" in refusal(load, tmp_path / "a.parquet", input_key="zzz")
    (tmp_path / "a.csv.gz").write_bytes(b"no gzip at all")
    assert "cannot be read" in refusal(load, tmp_path / "a.csv.gz", input_key="zzz")
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).mkdir()
        for text in ("{}", "[" * 100_000):
            (tmp_path / name / name).write_text(text)
            assert "cannot be read, as of a data set that `datasets` saved" in refusal(load, tmp_path / name)
    (tmp_path / "a.arrow").write_bytes(b"\xff\xff\xff\xffnot arrow")
    assert "cannot be read" in refusal(load, tmp_path / "a.arrow", input_key="zzz")
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "a"}\n' * 10_000)[:-20])
    assert "cannot be read" in refusal(load, path, input_key="zzz")


def test_files_of_a_folder_must_have_the_columns_in_use(load: Load, tmp_path: Path) -> None:
    write_cells(tmp_path / "a.csv", ",")
    write_cells(tmp_path / "b.csv", ",", [{"question": "a", "solution": "b"}])
    assert "label_key = 'answer': no such column; the file has question" in refusal(load, tmp_path)


def test_a_template_joins_columns(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 2, "b": "3", "unit": ["m", "s"], "answer": 5}\n')
    (prompt,) = load(path, template="{a} + {b}, in {unit}? \\boxed{{}}").prompts
    assert prompt.text == '2 + 3, in ["m", "s"]? \\boxed{}'
    message = refusal(load, path, template="{a} + {bb}")
    assert "template = 'bb': no such column; the file has a, b, unit, answer: did you mean b?" in message
    path.write_text('{"a": 1, "b": 1}\n{"a": null, "b": 1}\n')
    assert f"{path}:2: column 'a' (template) is null" in refusal(load, path, template="{a} {b}", label_key=None)


def test_columns_become_entries_of_the_metadata(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": 1, "level": 3, "extra": {"level": 1, "kind": "k"}}\n')
    (prompt,) = load(path, metadata_key="extra", metadata_columns=("level",)).prompts
    assert prompt.metadata == {"level": 3, "kind": "k"}
    assert "metadata_columns = 'lvl': no such column" in refusal(load, path, metadata_columns=("lvl",))


def test_files_of_cells_and_of_arrow_are_not_held(tmp_path: Path) -> None:
    import tracemalloc

    rows = [{"question": "x" * 1_000, "answer": "1"} for _ in range(4_000)]
    write_cells(tmp_path / "a.csv", ",", rows)
    save_as_datasets_does(tmp_path / "saved", rows)
    for path in (tmp_path / "a.csv", tmp_path / "saved"):
        tracemalloc.start()
        assert sum(1 for _ in open_prompt_file(f"{path}@[:-1]", columns=["question"]).rows) == 3_999
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000
