from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.viewer.made_runs import NASTY, commit_of

from rollfeed.base.serving import guard
from rollfeed.errors import ConfigError
from rollfeed.evaluation import ANSWERS_SCHEMA
from rollfeed.store import RunDirectory
from rollfeed.viewer import LOOPBACK, ViewServer, find_runs
from rollfeed.viewer.found_runs import version_of


@asynccontextmanager
async def viewer(*folders: Path) -> AsyncIterator[Callable[..., Any]]:
    """Serve; give a function that asks the API and returns what it says."""
    application = ViewServer(folders).application()
    application.middlewares.insert(0, guard(LOOPBACK))
    async with TestClient(TestServer(application)) as client:

        async def ask(path: str, *, status: int = 200, **query: Any) -> Any:
            async with client.get(f"/api/{path}", params=query) as reply:
                assert reply.status == status, await reply.text()
                return await reply.json()

        ask.client = client  # type: ignore[attr-defined]
        yield ask


def write_evaluation(path: Path) -> Path:
    path.mkdir(parents=True)
    names = (
        "set",
        "index",
        "answer",
        "prompt_id",
        "prompt",
        "label",
        "response",
        "status",
        "response_length",
        "reward",
    )
    rows = [
        dict(
            zip(
                names,
                ("sums", index, answer, f"sums/{index}", "2 + 2 =", '"4"', f"{answer}", "completed", 1, answer),
                strict=True,
            )
        )
        | {"correct": bool(answer), "messages": json.dumps([{"role": "user", "content": "2 + 2"}])}
        for index in range(3)
        for answer in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=ANSWERS_SCHEMA), path / "answers.parquet")
    numbers = {"num_prompts": 3, "n_samples_per_prompt": 2, "accuracy": 0.5, "accuracy_low": 0.2, "accuracy_high": 0.8}
    (path / "eval.json").write_text(json.dumps({"model": "tiny", "sets": {"sums": numbers}}))
    return path


async def test_runs_and_evaluations_below_a_folder_are_listed(make_run, tmp_path) -> None:
    make_run("sweep/one")
    make_run("two", num_steps=1)
    write_evaluation(tmp_path / "runs" / "scores")
    async with viewer(tmp_path / "runs") as ask:
        found = {line["name"]: line for line in await ask("runs")}
        assert list(found) == ["scores", "sweep/one", "two"]
        one = found["sweep/one"]
        assert (one["steps"], one["samples"], one["reward"]) == (3, 18, pytest.approx(0.6))
        assert (found["scores"]["kind"], found["scores"]["accuracy"], found["scores"]["samples"]) == (
            "evaluation",
            0.5,
            6,
        )
        make_run("later", num_steps=1)
        assert "later" in [line["name"] for line in await ask("runs")]


async def test_an_overview_has_steps_curves_and_settings(make_run) -> None:
    async with viewer(make_run()) as ask:
        found = await ask("run", run="run")
    curves = {curve["name"]: curve for curve in found["curves"]}
    assert curves["rollout/reward_mean"] == {"name": "rollout/reward_mean", "x": [0, 1, 2], "y": [0.4, 0.5, 0.6]}
    assert "rollout/empty" not in curves
    assert found["steps"]["dropped"] == [1, 1, 1]
    assert found["steps"]["reasons"][0] == {"zero_std_0.0": 1}
    assert (found["status"], found["settings"]["seed"]) == ("finished", 1)


async def test_curves_of_a_training_have_loss_and_accuracy_with_its_interval(make_run) -> None:
    path = make_run()
    (path / "train.jsonl").write_text('{"step": 0, "train/loss": 0.5}\n{"step": 1, "train/lo')
    numbers = {"accuracy": 0.25, "accuracy_low": 0.1, "accuracy_high": 0.5, "reward_mean": 0.25}
    numbers |= {"response_length_mean": 3.0, "truncated_ratio": 0.0}
    (path / "eval.jsonl").write_text(json.dumps({"step": 0, "accuracy": 0.25, "sets": {"sums": numbers}}) + "\n")
    async with viewer(path) as ask:
        found = await ask("run", run="run")
    curves = {curve["name"]: curve for curve in found["curves"]}
    assert found["kind"] == "training"
    assert curves["train/loss"]["y"] == [0.5]
    assert [curves["eval/sums/accuracy"][key] for key in ("y", "low", "high")] == [[0.25], [0.1], [0.5]]


async def test_long_curves_are_thinned_to_means(make_run) -> None:
    path = make_run()
    lines = "".join(json.dumps({"step": step, "train/loss": float(step)}) + "\n" for step in range(2500))
    (path / "train.jsonl").write_text(lines)
    async with viewer(path) as ask:
        found = next(each for each in (await ask("run", run="run"))["curves"] if each["name"] == "train/loss")
    assert (len(found["x"]), found["x"][:2], found["y"][:2], found["y"][-1]) == (834, [0, 3], [1.0, 4.0], 2499.0)


async def test_a_run_that_grows_has_another_version(tmp_path) -> None:
    path = tmp_path / "run"
    with RunDirectory.open(path, settings={"seed": 1}, identity={"seed": 1}, overwrite=False) as run:
        async with viewer(path) as ask:
            empty = await ask("run", run="run")
            assert (empty["status"], empty["steps"]["step"]) == ("running", [])
            run.commit(commit_of(0), reward_key=None)
            first = await ask("run", run="run", version=empty["version"])
            assert first["steps"]["step"] == [0]
            assert await ask("run", run="run", version=first["version"]) == {"version": first["version"]}
            run.finish()
            assert (await ask("run", run="run", version=first["version"]))["status"] == "finished"


@pytest.mark.parametrize(
    ("filters", "order", "found"),
    [
        (["step=0"], "", ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "2.0", "2.1"]),
        (["step=0", "wrong", ""], "", ["0.1", "0.2", "1.2", "2.0", "2.1"]),
        (["dropped"], "", ["8.0", "8.1", "5.0", "5.1", "2.0", "2.1"]),
        (["step=0", "kept"], "worst", ["0.1", "0.2", "1.2", "1.1", "0.0", "1.0"]),
        (["step=0", "truncated, reward>0.1"], "", ["1.1"]),
        (["prompt~IS 3 + 1"], "", ["3.0", "3.1", "3.2"]),
        (["it is 1."], "", ["0.1", "1.0"]),
        (["step=0", "kept", "is 1"], "", ["0.1", "1.0"]),
        (["it is 1, and so"], "", []),
    ],
)
async def test_samples_are_filtered_and_sorted(make_run, filters, order, found) -> None:
    async with viewer(make_run()) as ask:
        answer = await ask("samples", run="run", filter=filters, order=order)
    assert [f"{row['group']}.{row['member']}" for row in answer["rows"]] == found
    assert not answer["more"]


async def test_a_row_says_what_became_of_its_sample(make_run) -> None:
    async with viewer(make_run()) as ask:
        found = await ask("samples", run="run", filter=["step=1", "dropped"], num="1")
    (row,) = found["rows"]
    assert found["more"]
    assert row == {
        **{"id": "1.5.0.50", "step": 1, "group": 5, "member": 0, "source": "sums", "reward": 0.0, "correct": "no"},
        **{"status": "completed", "length": 5, "drop_reason": "zero_std_0.0", "error": False},
        "question": f"What is 5 + 1? {NASTY}",
    }


async def test_a_sample_has_a_text_a_token_and_its_numbers(make_run) -> None:
    async with viewer(make_run()) as ask:
        sample = await ask("sample", run="run", id="0.0.1.1")
    # The tokenizer's ids from 3 on are the 256 characters that stand for bytes.
    assert sample["tokens"][sample["num_prompt"] :] == list("Z[\\]^")
    assert (sample["mask"], sample["versions"]) == ([[2, 1.0], [1, 0.0], [2, 1.0]], [[2, 3], [3, 4]])
    assert (sample["logprobs"][0], sample["advantage"], sample["detail"]) == (-2.0, -0.25, "seen")
    assert [each["reward"] for each in sample["members"]] == [1.0, 0.0, 0.0]
    assert (sample["messages"][0]["role"], sample["prompt_label"]) == ("system", "1")


async def test_numbers_that_a_browser_would_round_are_texts(make_run) -> None:
    label = 2**80
    async with viewer(make_run(num_steps=1, label=label)) as ask:
        sample = await ask("sample", run="run", id="0.0.1.1")
    assert sample["prompt_label"] == str(label)


@pytest.mark.parametrize("checkpoint", ["/nowhere/gone", "nobody/has-fetched-this"])
async def test_tokens_are_numbers_where_the_tokenizer_is_not_here(make_run, checkpoint) -> None:
    async with viewer(make_run(checkpoint=checkpoint)) as ask:
        sample = await ask("sample", run="run", id="0.0.1.1")
    assert (sample["has_texts"], sample["tokens"][4:6]) == (False, ["⟨60⟩", "⟨61⟩"])


async def test_a_training_that_was_copied_here_brings_its_tokenizer(make_run, tiny_checkpoint) -> None:
    path = make_run(checkpoint="elsewhere/model")
    shutil.copytree(tiny_checkpoint, path / "model")
    async with viewer(path) as ask:
        sample = await ask("sample", run="run", id="0.0.1.1")
    assert sample["tokens"][4:6] == ["Z", "["]


async def test_code_of_a_model_is_not_run_whatever_the_run_says(make_run, tiny_checkpoint, tmp_path) -> None:
    model, marker = tmp_path / "model", tmp_path / "was-run"
    shutil.copytree(tiny_checkpoint, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "mine.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    async with viewer(make_run(checkpoint=model, model={"trust_remote_code": True})) as ask:
        assert (await ask("sample", run="run", id="0.0.1.1"))["num_prompt"] == 4
    assert not marker.exists()


async def test_a_chat_template_that_has_gone_hides_no_tokens(make_run) -> None:
    async with viewer(make_run(model={"chat_template": "gone.jinja", "of_another_version": 1})) as ask:
        assert (await ask("sample", run="run", id="0.0.1.1"))["has_texts"]


async def test_answers_of_an_evaluation_are_samples(tmp_path) -> None:
    async with viewer(write_evaluation(tmp_path / "scores")) as ask:
        rows = (await ask("samples", run="scores", filter="wrong"))["rows"]
        assert [(row["group"], row["member"], row["question"]) for row in rows] == [(n, 0, "2 + 2") for n in range(3)]
        sample = await ask("sample", run="scores", id=rows[1]["id"])
    assert (sample["group"], sample["tokens"], sample["label"], len(sample["members"])) == (1, ["0"], "4", 2)
    assert sample["messages"] == [{"role": "user", "content": "2 + 2"}]


@pytest.mark.parametrize(
    ("path", "query", "message"),
    [
        ("sample", {"run": "run", "id": f"0.{10**20}.0.0"}, "OverflowError"),
        ("run", {"run": "../run"}, "there is no run '../run' here"),
        ("samples", {"run": "run", "filter": "rewrd<1"}, "no field 'rewrd'"),
        ("samples", {"run": "run", "num": "x"}, "invalid literal"),
        ("sample", {"run": "run", "id": "0.0"}, "'0.0' names no sample"),
        ("sample", {"run": "run", "id": "7.0.0.0"}, "has no step 7; it has steps 0 to 2"),
        ("sample", {"run": "run", "id": "0.7.0.0"}, "step 0 has no group 7"),
        ("sample", {"run": "run", "id": "0.0.5.5"}, "group 0 of step 0 has no sample 0.0.5.5"),
    ],
)
async def test_what_is_not_there_is_one_line(make_run, path, query, message) -> None:
    async with viewer(make_run()) as ask:
        error = (await ask(path, status=422, **query))["error"]
    assert message in error
    assert "\n" not in error


async def test_a_damaged_run_is_one_line_and_the_others_are_shown(make_run) -> None:
    damaged, _ = make_run("damaged"), make_run("whole")
    (damaged / "steps.jsonl").write_bytes(b"{")
    async with viewer(damaged.parent) as ask:
        lines = {line["name"]: line for line in await ask("runs")}
        assert "steps.jsonl: is damaged" in lines["damaged"]["problem"]
        assert lines["whole"]["steps"] == 3
        assert "is damaged" in (await ask("run", status=422, run="damaged"))["error"]


@pytest.mark.parametrize(
    ("name", "line"),
    [("eval.jsonl", "3"), ("eval.jsonl", '{"step": 0, "sets": {"sums": 3}}'), ("train.jsonl", '{"train/loss": 1}')],
)
async def test_lines_of_something_else_are_told_and_the_other_runs_shown(make_run, name, line) -> None:
    damaged, _ = make_run("damaged"), make_run("whole", num_steps=1)
    (damaged / name).write_text(line + "\n")
    async with viewer(damaged.parent) as ask:
        lines = {line["name"]: line for line in await ask("runs")}
        assert f"{name}: is damaged" in lines["damaged"]["problem"]
        assert lines["whole"]["steps"] == 1
        assert f"{name}: is damaged" in (await ask("run", status=422, run="damaged"))["error"]


async def test_a_folder_that_may_not_be_read_is_passed_over(make_run, monkeypatch) -> None:
    path = make_run("whole", num_steps=1)
    (path.parent / "secret").mkdir()
    exists = Path.exists

    def denied(self: Path, **options: Any) -> bool:
        if self.parent.name == "secret":
            raise PermissionError(13, "Permission denied", str(self))
        return exists(self, **options)

    monkeypatch.setattr(Path, "exists", denied)
    assert find_runs([path.parent]) == {"whole": path}


def test_a_file_that_goes_while_it_is_looked_at_is_no_problem(make_run, monkeypatch) -> None:
    path = make_run(num_steps=1)
    exists, stat = Path.exists, Path.stat

    def gone(self: Path, **options: Any) -> Any:
        if self.name.endswith("-wal"):
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "exists", lambda self, **options: self.name.endswith("-wal") or exists(self, **options))
    monkeypatch.setattr(Path, "stat", gone)
    assert version_of(path) == version_of(path)


async def test_a_name_that_is_no_text_is_listed(make_run) -> None:
    path = make_run("\udcff-run", num_steps=1)
    async with viewer(path.parent) as ask:
        (line,) = await ask("runs")
        assert line["steps"] == 1
        assert (await ask("run", run=line["name"]))["steps"]["step"] == [0]


async def test_a_sample_file_that_is_damaged_is_one_line(make_run) -> None:
    path = make_run()
    (path / "batches" / "step-000001.parquet").write_bytes(b"PAR1")
    async with viewer(path) as ask:
        assert (
            "step-000001.parquet: is damaged" in (await ask("samples", status=422, run="run", filter="step=1"))["error"]
        )
        assert (await ask("samples", run="run", filter="step=0"))["rows"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80"])
async def test_another_host_is_refused(make_run, host) -> None:
    async with viewer(make_run()) as ask:
        for path in ("/", "/api/runs", "/view.js"):
            async with ask.client.get(path, headers={"Host": host}) as reply:
                assert reply.status == 403


@pytest.mark.parametrize("host", ["localhost:7150", "127.0.0.1", "[::1]:9000"])
async def test_loopback_is_answered_under_any_port(make_run, host) -> None:
    async with viewer(make_run()) as ask, ask.client.get("/api/runs", headers={"Host": host}) as reply:
        assert reply.status == 200


async def test_other_pages_are_refused_and_may_link_to_the_page(make_run) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    async with viewer(make_run()) as ask:
        for path, mode, status in (("/api/runs", "cors", 403), ("/view.js", "no-cors", 403), ("/", "navigate", 200)):
            async with ask.client.get(path, headers={**foreign, "Sec-Fetch-Mode": mode}) as reply:
                assert reply.status == status


async def test_the_page_runs_its_own_script_only(make_run) -> None:
    async with viewer(make_run()) as ask:
        for path in ("/", "/api/runs", "/view.js", "/nothing"):
            async with ask.client.get(path) as reply:
                policy = reply.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
                assert "unsafe" not in policy
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                assert "Access-Control-Allow-Origin" not in reply.headers


@pytest.mark.parametrize(
    ("name", "message"), [("gone", "does not exist"), ("file", "is not a directory"), ("empty", "has no run")]
)
def test_a_folder_without_runs_is_refused(tmp_path, name, message) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        find_runs([tmp_path / name])


def test_runs_of_two_folders_have_names_of_their_own(make_run) -> None:
    one, other = make_run("a/x"), make_run("b/x")
    assert find_runs([one.parent, other.parent]) == {"a/x": one, "b/x": other}
    assert set(find_runs([one, other]).values()) == {one, other}
