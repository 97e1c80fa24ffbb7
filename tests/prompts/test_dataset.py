from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rollfeed.errors import ConfigError, DataError
from rollfeed.prompts import ChatRenderer, ColumnKeys, DatasetSource, load_prompts, load_tokenizer
from rollfeed.types import Prompt

Write = Callable[..., str]
TEN = [{"prompt": f"question {number}"} for number in range(10)]


@pytest.fixture
def make_source(renderer: ChatRenderer) -> Callable[..., DatasetSource]:
    def make(path: str, **settings: Any) -> DatasetSource:
        keys = ColumnKeys(**{key: settings.pop(key) for key in list(settings) if key.endswith("_key")})
        order = {key: settings.pop(key) for key in ("seed", "rollout_shuffle", "num_epoch") if key in settings}
        loaded = load_prompts(path, **{"renderer": renderer, "keys": keys} | settings)
        return DatasetSource(loaded, **{"seed": 1} | order)

    return make


Make = Callable[..., DatasetSource]


async def ids_of(source: DatasetSource, count: int) -> list[str]:
    return [prompt.prompt_id for prompt in await source.draw(count)]


# Reading


async def test_row_becomes_a_prompt(make_source: Make, write_jsonl: Write) -> None:
    row = {
        "question": "2 + 2?",
        "answer": ["4", 4],
        "extra": '{"rm_type": "exact"}',
        "tools": [{"name": "add"}],
        "picture": [],
    }
    keys = {
        "input_key": "question",
        "label_key": "answer",
        "metadata_key": "extra",
        "tools_key": "tools",
        "image_key": "picture",
    }
    (prompt,) = await make_source(write_jsonl([row]), **keys).draw(1)
    assert prompt.prompt_id == "train/0@e0"
    assert prompt.source == "train"
    assert prompt.text == '<bos><turn>user\n2 + 2?</turn>[{"name": "add"}]<turn>assistant\n'
    assert prompt.messages == ({"role": "user", "content": "2 + 2?"},)
    assert prompt.label == ["4", 4]
    assert prompt.metadata == {"rm_type": "exact"}
    assert prompt.tools == ({"name": "add"},)
    assert prompt.images == ()


async def test_prompts_of_a_row_share_one_array_of_token_ids(make_source: Make, write_jsonl: Write) -> None:
    first, second = await make_source(write_jsonl([{"prompt": "hi"}])).draw(2)
    assert first.token_ids is second.token_ids


async def test_raw_text_is_not_rendered(make_source: Make, write_jsonl: Write) -> None:
    (prompt,) = await make_source(write_jsonl([{"prompt": "abcd="}]), apply_chat_template=False).draw(1)
    assert (prompt.text, prompt.messages) == ("abcd=", None)


async def test_parquet_rows_become_the_same_prompts_as_jsonl(
    make_source: Make, write_jsonl: Write, tmp_path: Path
) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": 4, "extra": '{"a": 1}', "unused": 1},
        {"prompt": [{"role": "user", "content": "ho"}], "answer": 5, "extra": None, "unused": 2},
    ]
    tool_message = {"role": "assistant", "content": "hi", "tool_calls": None}
    rows_parquet = [{**rows[0], "prompt": [{**tool_message, "role": "user"}]}, rows[1]]
    parquet.write_table(pa.Table.from_pylist(rows_parquet), tmp_path / "train.parquet")
    keys = {"label_key": "answer", "metadata_key": "extra"}
    from_parquet = await make_source(str(tmp_path / "train.parquet"), **keys).draw(2)
    from_jsonl = await make_source(write_jsonl(rows), **keys).draw(2)
    for ours, theirs in zip(from_parquet, from_jsonl, strict=True):
        assert (ours.text, ours.messages, ours.label, ours.metadata, ours.prompt_id) == (
            theirs.text,
            theirs.messages,
            theirs.label,
            theirs.metadata,
            theirs.prompt_id,
        )


async def test_parquet_nulls_are_no_entries_of_tools_calls_labels_and_metadata(
    make_source: Make, write_jsonl: Write, tmp_path: Path
) -> None:
    def row(name: str, key: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        call = {"function": {"name": name, "arguments": {key: "v"}}}
        return {
            "prompt": [{"role": "user", "content": [{"type": "text", key: "x", "text": name}]}],
            "label": {key: [{key: 1}]},
            "metadata": {"rm_type": "exact", key: {key: [1]}},
            "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
            "calls": [call],
        }

    rows = [row("weather", "city"), row("calc", "expr")]
    for each in rows:
        each["prompt"] += [{"role": "assistant", "tool_calls": each.pop("calls")}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    keys = {"label_key": "label", "metadata_key": "metadata", "tools_key": "tools"}
    from_jsonl = await make_source(write_jsonl(rows), **keys).draw(2)
    from_parquet = await make_source(str(tmp_path / "train.parquet"), **keys).draw(2)
    for ours, theirs in zip(from_parquet, from_jsonl, strict=True):
        assert (ours.text, ours.messages, ours.tools) == (theirs.text, theirs.messages, theirs.tools)
        assert (ours.label, ours.metadata) == (theirs.label, theirs.metadata)


async def test_maps_and_texts_of_json_in_parquet_are_objects(make_source: Make, tmp_path: Path) -> None:
    messages = '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\\ud83d"}]'
    table = pa.table(
        {
            "prompt": [messages],
            "meta": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
            "tools": [['{"name": "search"}']],
        }
    )
    parquet.write_table(table, tmp_path / "train.parquet")
    source = make_source(str(tmp_path / "train.parquet"), metadata_key="meta", tools_key="tools")
    (prompt,) = await source.draw(1)
    assert prompt.text.startswith("<bos><turn>user\nhi</turn><turn>assistant\n\ufffd</turn>")
    assert (prompt.metadata, prompt.tools) == ({"a": 1}, ({"name": "search"},))


async def test_text_that_is_json_but_not_of_messages_is_a_question(make_source: Make, write_jsonl: Write) -> None:
    texts = ['["role"]', '[{"role": 3}]', '[{"role": "user"', '{"role": "user", "content": "a"}']
    prompts = await make_source(write_jsonl([{"prompt": text} for text in texts])).draw(len(texts))
    assert [prompt.messages for prompt in prompts] == [({"role": "user", "content": text},) for text in texts]


async def test_messages_as_json_text_stay_text_where_no_template_is_applied(
    make_source: Make, write_jsonl: Write
) -> None:
    text = '[{"role": "user", "content": "hi"}]'
    (prompt,) = await make_source(write_jsonl([{"prompt": text}]), apply_chat_template=False).draw(1)
    assert prompt.text == text


async def test_halves_of_surrogate_pairs_become_replacement_characters(make_source: Make, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(
        rb'{"prompt": "cut \ud83d here", "label": ["\udc00"], "meta": {"k\uDBFF": "{"}, "tools": [{"name": "\ud800"}]}'
        b'\n{"prompt": "\xed\xa0\xbd", "label": "\xf0\x9f\x98\x80", "meta": "{\\"a\\": \\"\\\\ud83d\\"}"}\n'
    )
    keys = {"label_key": "label", "metadata_key": "meta", "tools_key": "tools"}
    first, second = await make_source(str(path), **keys).draw(2)
    assert first.messages == ({"role": "user", "content": "cut \ufffd here"},)
    assert (first.label, first.metadata, first.tools) == (["\ufffd"], {"k\ufffd": "{"}, ({"name": "\ufffd"},))
    assert "cut \ufffd here" in first.text
    assert "\ufffd" in second.text
    assert (second.label, second.metadata) == ("\U0001f600", {"a": "\ufffd"})


async def test_a_template_is_tried_with_the_rows_and_no_other_question(
    make_source: Make, write_jsonl: Write, tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    template = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}x"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", chat_template=template))
    renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = write_jsonl([{"prompt": messages}] * 2)
    assert len(make_source(path, renderer=renderer)) == 2
    path = write_jsonl([{"prompt": messages}, {"prompt": "q"}])
    assert "train.jsonl:2: the model's chat template refuses the messages: system first" in refusal(
        make_source, path, renderer=renderer
    )


def test_an_image_in_a_message_is_named_with_its_row(make_source: Make, write_jsonl: Write) -> None:
    part = {"type": "image_url", "image_url": {"url": "a.png"}}
    path = write_jsonl([{"prompt": "a"}, {"prompt": [{"role": "user", "content": [part]}]}])
    assert refusal(make_source, path).startswith(f"{path}:2: content may hold text only here, no pictures")


async def test_batches_of_a_parquet_file_that_are_too_large_to_join_are_read_in_smaller_ones(
    make_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(TEN), path, row_group_size=6)
    read, sizes = parquet.ParquetFile.iter_batches, []

    def refusing_large_ones(file: Any, *, batch_size: int, **settings: Any) -> Any:
        sizes.append(batch_size)
        for batch in read(file, batch_size=batch_size, **settings):
            yield batch
            if batch_size > 1:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", refusing_large_ones)
    monkeypatch.setattr("rollfeed.prompts.files.column_files._MAX_BATCH_ROWS", 4)
    source = make_source(f"{path}@[1:]", num_epoch=1)
    assert await ids_of(source, 99) == [f"train/{row}@e0" for row in range(1, 10)]
    assert sizes == [4, 1, 1]


async def test_rows_of_a_parquet_file_are_read_by_their_size_and_not_by_that_of_their_encoding(
    make_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.parquet"
    texts = ["a"] * 200 + ["long " * 20_000] * 100  # a dictionary holds the long text once
    parquet.write_table(pa.table({"prompt": texts}), path)
    read, sizes = parquet.ParquetFile.iter_batches, []

    def noting(file: Any, *, batch_size: int, **settings: Any) -> Any:
        for batch in read(file, batch_size=batch_size, **settings):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", noting)
    monkeypatch.setattr("rollfeed.prompts.files.column_files._BATCH_BYTES", 200_000)
    monkeypatch.setattr("rollfeed.prompts.files.column_files._MAX_BATCH_ROWS", 128)
    source = make_source(str(path), num_epoch=1)
    assert [prompt.text.count("long") for prompt in await source.draw(999)] == [0] * 200 + [20_000] * 100
    assert (sizes[0], max(sizes)) == (64, 128)
    assert sizes[-1] <= 8


async def test_text_of_a_parquet_row_that_is_not_utf8_is_named(make_source: Make, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    bad = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xff\xfe"))
    parquet.write_table(pa.table({"prompt": bad}), path)
    assert refusal(make_source, str(path)).startswith(f"{path}: row 1: a value cannot be read: 'utf-8' codec")
    assert await ids_of(make_source(str(path), skip_bad_rows=True, num_epoch=1), 9) == ["train/0@e0"]


async def test_blank_lines_and_a_byte_order_mark_are_no_rows(make_source: Make, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert await ids_of(make_source(str(path), num_epoch=1), 9) == ["train/0@e0", "train/1@e0"]


@pytest.mark.parametrize(
    ("bounds", "rows"),
    [
        (":", range(10)),
        ("2:5", range(2, 5)),
        ("-3:", range(7, 10)),
        (":-7", range(3)),
        ("8:99", range(8, 10)),
        ("-4:-2", range(6, 8)),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_slice_keeps_the_row_numbers_of_the_file(
    make_source: Make, write_jsonl: Write, tmp_path: Path, bounds: str, rows: range, suffix: str
) -> None:
    write_jsonl(TEN)
    parquet.write_table(pa.Table.from_pylist(TEN), tmp_path / "train.parquet")
    source = make_source(f"{tmp_path}/train.{suffix}@[{bounds}]", num_epoch=1)
    prompts = await source.draw(99)
    assert [prompt.prompt_id for prompt in prompts] == [f"train/{row}@e0" for row in rows]
    assert [f"question {row}" in prompt.text for row, prompt in zip(rows, prompts, strict=True)] == [True] * len(rows)


async def test_file_whose_name_looks_like_a_slice_opens(make_source: Make, write_jsonl: Write) -> None:
    path = write_jsonl(TEN, "odd@[0:3].jsonl")
    assert len(make_source(path)) == 10
    assert len(make_source(f"{path}@[0:2]")) == 2


# The length limit


async def test_prompts_over_the_limit_are_dropped_and_counted_in_order(
    make_source: Make, make_renderer: Callable[[int], ChatRenderer], write_jsonl: Write
) -> None:
    path = write_jsonl([{"prompt": text} for text in ("ab", "éé", "éa", "abcd", "abc", "ééé")])
    source = make_source(path, renderer=make_renderer(4), apply_chat_template=False, num_epoch=1)
    assert await ids_of(source, 9) == ["train/0@e0", "train/2@e0", "train/4@e0"]
    assert source.loaded.num_over_length == 3


async def test_without_a_limit_every_prompt_is_kept(make_source: Make, write_jsonl: Write) -> None:
    source = make_source(write_jsonl([{"prompt": "long " * 1000}, {"prompt": "short"}]))
    assert (len(source), source.loaded.num_over_length) == (2, 0)


def test_every_prompt_over_the_limit_is_an_error(
    make_source: Make, make_renderer: Callable[[int], ChatRenderer], write_jsonl: Write
) -> None:
    path = write_jsonl([{"prompt": "abcdef"}, {"prompt": "abcde"}])
    with pytest.raises(
        DataError, match=r"every prompt \(2\) is longer than rollout_max_prompt_len; the shortest has 6"
    ):
        make_source(path, renderer=make_renderer(3), apply_chat_template=False)


# Bad input: one line that says what, where and what to do


def refusal(make_source: Make, path: str, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        make_source(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": "a"', "not JSON: Expecting ',' delimiter"),
        ('{"prompt": NaN}', "not JSON: NaN is not a JSON value"),
        ("[" * 100_000, "not JSON: nested too deeply"),
        ('{"prompt": "\udcff"}', "not JSON"),
        ('["a"]', "must be a JSON object, is a list"),
        ('{"text": "a"}', "no column 'prompt' (input_key); the row has text"),
        ('{"prompt": null}', "column 'prompt' (input_key) is null"),
        ('{"prompt": ""}', "column 'prompt' is empty"),
        ('{"prompt": 3}', "column 'prompt' must be a text or a list of messages, is a int"),
        ('{"prompt": []}', "column 'prompt' must be a text or a list of messages, is an empty list"),
        ('{"prompt": ["hi"]}', "message 0 of column 'prompt' must be an object with a role and a content, is a str"),
        ('{"prompt": [{"role": "user"}]}', "message 0 of column 'prompt' has no content"),
        ('{"prompt": [{"role": "user", "content": 3}]}', "content of message 0"),
    ],
)
def test_bad_row_is_named_with_file_and_line(make_source: Make, tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    message = refusal(make_source, str(path))
    assert message.startswith(f"{path}:3: {what}")
    assert message.endswith("mend the row, or set skip_bad_rows = true")
    source = make_source(str(path), skip_bad_rows=True)
    assert (len(source), source.loaded.num_bad_rows) == (1, 1)
    assert source.loaded.first_bad_row is not None
    assert source.loaded.first_bad_row.startswith(f"{path}:3: {what}")


@pytest.mark.parametrize(
    ("row", "key", "what"),
    [
        ({"answer": "{"}, "metadata_key", "column 'answer' is a text that is not JSON"),
        ({"answer": [1]}, "metadata_key", "column 'answer' must be an object or its JSON text, is a list"),
        ({"answer": ["search"]}, "tools_key", "column 'answer' must be a list of tool objects or its JSON text"),
        ({"answer": [3]}, "image_key", "column 'answer' must be a path, URL, data URI or bytes, or a list"),
    ],
)
def test_bad_column_of_a_row_is_named(
    make_source: Make, write_jsonl: Write, row: dict[str, Any], key: str, what: str
) -> None:
    good: dict[str, Any] = {"metadata_key": {}, "tools_key": [], "image_key": []}
    path = write_jsonl([{"prompt": "a", "answer": good[key]}, {"prompt": "b", **row}])
    assert refusal(make_source, path, **{key: "answer"}).startswith(f"{path}:2: {what}")


async def test_rows_without_a_label_have_none(make_source: Make, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": None}, {"prompt": "c"}])
    source = make_source(path, label_key="answer")
    assert [prompt.label for prompt in await source.draw(3)] == [0, None, None]


def test_a_row_that_is_of_no_use_is_named_or_skipped(make_source: Make, write_jsonl: Write) -> None:
    def check(prompt: Prompt) -> str | None:
        return "asks for b" if prompt.messages and prompt.messages[-1]["content"] == "b" else None

    path = write_jsonl([{"prompt": "a"}, {"prompt": "b"}])
    expected = f"{path}:2: asks for b"
    assert refusal(make_source, path, check_row=check) == f"{expected}; mend the row, or set skip_bad_rows = true"
    source = make_source(path, check_row=check, skip_bad_rows=True)
    assert (len(source), source.loaded.num_bad_rows, source.loaded.first_bad_row) == (1, 1, expected)


def test_optional_columns_may_be_left_out_of_rows(make_source: Make, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "a", "meta": {}, "tools": "[]", "images": []}, {"prompt": "b"}])
    assert len(make_source(path, metadata_key="meta", tools_key="tools", image_key="images")) == 2


def test_parquet_value_that_json_cannot_hold_is_named_with_its_row(make_source: Make, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([{"prompt": "a", "answer": b"\xff"}]), path)
    message = refusal(make_source, str(path), label_key="answer")
    assert message.startswith(f"{path}: row 0: column 'answer' has a value that JSON cannot hold")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_column_that_no_row_has_is_an_error_with_the_nearest(
    make_source: Make, write_jsonl: Write, tmp_path: Path, suffix: str
) -> None:
    rows = [{"prompt": "a", "answer": 1}]
    write_jsonl(rows)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    path = f"{tmp_path}/train.{suffix}"
    message = refusal(make_source, path, label_key="anwser", skip_bad_rows=True)
    assert message == f"{path}: label_key = 'anwser': no such column; the file has prompt, answer: did you mean answer?"
    assert refusal(make_source, path, input_key="zzz").endswith(
        "the file has prompt, answer: set input_key to one of them"
    )


def test_missing_file_names_the_nearest(make_source: Make, write_jsonl: Write, tmp_path: Path) -> None:
    write_jsonl(TEN)
    assert refusal(make_source, f"{tmp_path}/trian.jsonl").endswith("no such file; did you mean train.jsonl?")
    assert refusal(make_source, f"{tmp_path}/trian.jsonl@[0:2]").endswith("no such file; did you mean train.jsonl?")
    assert "does not exist either" in refusal(make_source, f"{tmp_path}/no/train.jsonl")


@pytest.mark.parametrize("bounds", ["0:2:1", "a:b", "0", ""])
def test_malformed_slice_shows_how_to_write_one(make_source: Make, write_jsonl: Write, bounds: str) -> None:
    assert "for example train.jsonl@[0:100]" in refusal(make_source, f"{write_jsonl(TEN)}@[{bounds}]")


def test_what_is_no_file_of_a_known_kind_is_refused(make_source: Make, tmp_path: Path) -> None:
    assert "is a folder without a .jsonl" in refusal(make_source, str(tmp_path))
    (tmp_path / "train.xlsx").write_text("prompt\n")
    assert "unknown kind of file '.xlsx'; use .jsonl, .json," in refusal(make_source, f"{tmp_path}/train.xlsx")
    assert "is not a regular file" in refusal(make_source, "/dev/null")
    assert "cannot be read" in refusal(make_source, "a" * 5_000 + ".jsonl")


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("train.json", b"{}", "is one JSON object; make it an array of objects, or one object a line"),
        ("train.json", b'[{"prompt": "a"},]', "not JSON: "),
        ("train.json", b'[\n{"prompt": "a"},\n{"prompt": a}\n]', "not JSON: Expecting value at line 3, column 12"),
        ("train.jsonl.gz", b"no", "cannot be read"),
        ("train.jsonl.xz", b"", "unpack it first"),
        ("train.jsonl", b"\x1f\x8b\x08", "is compressed, which its name does not say: add .gz"),
        ("train.jsonl", '{"prompt": "a"}'.encode("utf-16"), "is UTF-16 or UTF-32 text; save it as UTF-8"),
        (
            "train.jsonl",
            b'[{"prompt": "a"}, {"prompt": "b"}]',
            "is one JSON array; rename it to .json, or write one object a line",
        ),
        (
            "train.jsonl",
            b'[\n{"prompt": "a"},\n{"prompt": "b"}\n]',
            "is JSON over several lines; rename it to .json, or write one object a line",
        ),
        ("train.jsonl", b'{\n"prompt": "a"\n}', "is JSON over several lines"),
    ],
)
def test_a_file_of_another_form_is_told_from_one_with_a_bad_row(
    make_source: Make, tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert what in refusal(make_source, str(path), skip_bad_rows=True)


def test_the_kind_of_a_file_may_be_in_capitals(make_source: Make, write_jsonl: Write) -> None:
    assert len(make_source(write_jsonl(TEN, "TRAIN.JSONL"))) == 10


def test_empty_file_and_empty_slice_are_refused(make_source: Make, write_jsonl: Write, tmp_path: Path) -> None:
    assert refusal(make_source, write_jsonl(["", " "], "empty.jsonl")).endswith(
        "is empty; give a file with at least one row"
    )
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    assert "is empty" in refusal(make_source, f"{tmp_path}/empty.parquet")
    assert "the slice [3:3] selects none of its 10 rows" in refusal(make_source, f"{write_jsonl(TEN)}@[3:3]")


def test_file_that_is_no_parquet_is_refused(make_source: Make, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text('{"prompt": "a"}\n')
    assert "cannot be read" in refusal(make_source, f"{tmp_path}/train.parquet")


def test_file_of_bad_rows_only_is_refused(make_source: Make, write_jsonl: Write) -> None:
    message = refusal(make_source, write_jsonl(["{", "}"]), skip_bad_rows=True)
    assert "no row can be used, 2 are bad; the first:" in message
    assert "train.jsonl:1: not JSON" in message


def test_messages_that_the_template_refuses_are_a_bad_row(
    make_source: Make, write_jsonl: Write, tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", chat_template=template))
    path = write_jsonl([{"prompt": "a"}, {"prompt": [{"role": "assistant", "content": "b"}]}])
    renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None)
    assert "train.jsonl:2: the model's chat template refuses the messages: user first" in refusal(
        make_source, path, renderer=renderer
    )


def test_missing_chat_template_is_no_bad_row(
    make_source: Make, write_jsonl: Write, tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", chat_template=None))
    renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None)
    with pytest.raises(ConfigError, match="set apply_chat_template = false"):
        make_source(write_jsonl(TEN), renderer=renderer, skip_bad_rows=True)


# Order, epochs and resuming


async def test_without_shuffle_the_order_is_the_files(make_source: Make, write_jsonl: Write) -> None:
    assert await ids_of(make_source(write_jsonl(TEN)), 12) == [
        *(f"train/{row}@e0" for row in range(10)),
        "train/0@e1",
        "train/1@e1",
    ]


async def test_draw_larger_than_the_data_set_goes_round(make_source: Make, write_jsonl: Write) -> None:
    ids = await ids_of(make_source(write_jsonl(TEN[:3]), rollout_shuffle=True), 10)
    for epoch in range(3):
        assert sorted(ids[3 * epoch : 3 * epoch + 3]) == [f"train/{row}@e{epoch}" for row in range(3)]
    assert ids[9].endswith("@e3")
    assert len(set(ids)) == 10


async def test_shuffle_depends_on_seed_and_epoch_only(make_source: Make, write_jsonl: Write) -> None:
    path = write_jsonl(TEN)

    async def rows(seed: int) -> list[str]:
        ids = await ids_of(make_source(path, rollout_shuffle=True, seed=seed), 20)
        return [prompt_id.partition("@")[0] for prompt_id in ids]

    first, again, other = await rows(1), await rows(1), await rows(2)
    assert first == again != other
    assert first[:10] != first[10:]
    assert sorted(first[:10]) == sorted(first[10:]) == [f"train/{row}" for row in range(10)]


async def test_source_ends_after_num_epoch(make_source: Make, write_jsonl: Write) -> None:
    source = make_source(write_jsonl(TEN), num_epoch=2)
    assert len(await source.draw(15)) == 15
    assert len(await source.draw(15)) == 5
    assert await source.draw(1) == []


@pytest.mark.parametrize("stop", range(1, 13))
async def test_order_after_resuming_equals_an_unbroken_run(make_source: Make, write_jsonl: Write, stop: int) -> None:
    path = write_jsonl(TEN)
    unbroken = await ids_of(make_source(path, rollout_shuffle=True), 45)
    first = make_source(path, rollout_shuffle=True)
    ids = [prompt_id for _ in range(stop) for prompt_id in await ids_of(first, 3)]
    second = make_source(path, rollout_shuffle=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    ids += [prompt_id for _ in range(15 - stop) for prompt_id in await ids_of(second, 3)]
    assert ids == unbroken


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (TEN[:9], "num_rows is 9, but the run began with 10"),
        ([*TEN[:9], {"prompt": "another"}], "content_digest is"),
        ([*TEN[1:], TEN[0]], "content_digest is"),
    ],
)
def test_changed_file_is_refused_on_resume(
    make_source: Make, write_jsonl: Write, rows: list[object], what: str
) -> None:
    state = make_source(write_jsonl(TEN)).state_dict()
    with pytest.raises(ConfigError, match=what):
        make_source(write_jsonl(rows)).load_state_dict(state)


def test_changed_label_is_refused_on_resume(make_source: Make, write_jsonl: Write) -> None:
    state = make_source(write_jsonl([{"prompt": "a", "answer": 1}]), label_key="answer").state_dict()
    with pytest.raises(ConfigError, match="restore the file and the settings, or start a new run"):
        make_source(write_jsonl([{"prompt": "a", "answer": 2}]), label_key="answer").load_state_dict(state)


def test_other_shuffle_seed_is_refused_on_resume(make_source: Make, write_jsonl: Write) -> None:
    path = write_jsonl(TEN)
    state = make_source(path, rollout_shuffle=True).state_dict()
    with pytest.raises(ConfigError, match="shuffle_seed is 2, but the run began with 1"):
        make_source(path, rollout_shuffle=True, seed=2).load_state_dict(state)
