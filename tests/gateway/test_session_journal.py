"""A gateway that was killed knows all that its agents know, and writes each sample once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.gateway.clients import Client, gateway, said

from rollfeed.errors import ConfigError
from rollfeed.gateway.session_journal import SAMPLES, TURNS, FolderJournal, SessionOpened

QUESTION = {"role": "user", "content": "a"}


def killed(folder: Path) -> None:
    """Leave half an entry behind, as a kill in the middle of one does."""
    with (folder / TURNS).open("ab") as file:
        file.write(b"\x40\x00\x00\x00half of an en")


def stored(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]


def test_sessions_go_on_after_a_kill_with_their_keys_tokens_and_replies(tmp_path: Path) -> None:
    async def main() -> None:
        key = {"Idempotency-Key": "k"}
        async with gateway(folder=tmp_path) as client:
            opened, other = await client.open(metadata={"task": 7}, label="x"), await client.open()
            first = await client.chat(opened, [QUESTION], headers=key, n=2)
            url = f"{other['openai_base_url']}/responses"
            async with client.http.post(url, json={"input": "a"}) as response:
                answer = await response.json()
        killed(tmp_path)
        async with gateway(folder=tmp_path) as client:
            assert await client.chat(opened, [QUESTION], headers=key, n=2) == first
            assert not client.engine.requests
            text = first["choices"][1]["message"]["content"]
            told = [QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "b"}]
            said(await client.chat(opened, told))
            url = f"{client.address}/s/{other['key']}/v1/responses"
            body = {"input": "b", "previous_response_id": answer["id"]}
            async with client.http.post(url, json=body) as response:
                assert response.status == 200, await response.text()
            for session in (opened, other):
                (sample,) = await client.finish(session)
                assert sample["metadata"]["num_turns"] == (3 if session is opened else 2)
                assert sum(sample["loss_mask"]) == 4
        assert [each["label"] for each in stored(tmp_path)] == ["x", None]
        assert stored(tmp_path)[0]["metadata"]["task"] == 7

    asyncio.run(main())


def test_calls_have_other_ids_after_a_kill(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

    async def ask(client: Client, opened: dict[str, Any]) -> str:
        reply = await client.chat(opened, [QUESTION], tools=tools)
        return str(reply["choices"][0]["message"]["tool_calls"][0]["id"])

    async def main() -> None:
        from rollfeed.testing import ScriptedEngine

        async with gateway(ScriptedEngine(answer=lambda _: call), folder=tmp_path) as client:
            opened = await client.open()
            ids = [await ask(client, opened), await ask(client, opened)]
        async with gateway(ScriptedEngine(answer=lambda _: call), folder=tmp_path) as client:
            ids.append(await ask(client, opened))
        assert len(set(ids)) == 3

    asyncio.run(main())


@pytest.mark.parametrize("left", [0, 40, 1_000_000], ids=["nothing", "a part", "all"])
def test_samples_are_written_once_whenever_the_kill_comes(left: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(folder=tmp_path) as client:
            opened = [await client.open() for _ in range(3)]
            for each in opened:
                said(await client.chat(each, [QUESTION]))
            await client.finish(opened[0])
            size = (tmp_path / SAMPLES).stat().st_size
            finished = await client.finish(opened[1], reward=1.0)
        with (tmp_path / SAMPLES).open("r+b") as file:
            file.truncate(min(size + left, (tmp_path / SAMPLES).stat().st_size))
        for _ in range(2):
            async with gateway(folder=tmp_path) as client:
                assert await client.finish(opened[1]) == finished
                assert (await client.operate("GET", f"/sessions/{opened[1]['id']}"))[0] == 404
                assert (await client.operate("GET", f"/sessions/{opened[2]['id']}"))[1]["num_turns"] == 1
        async with gateway(folder=tmp_path) as client:
            await client.finish(opened[2])
        assert [each["metadata"]["session_id"] for each in stored(tmp_path)] == [each["id"] for each in opened]

    asyncio.run(main())


def test_a_journal_cut_anywhere_is_read_to_its_last_whole_turn(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(folder=tmp_path) as client:
            opened, messages = await client.open(), [QUESTION]
            for _ in range(5):
                text = said(await client.chat(opened, messages))
                messages = [*messages, {"role": "assistant", "content": text}, QUESTION]
        whole, random = (tmp_path / TURNS).read_bytes(), Random(0)
        for _ in range(8):
            (tmp_path / TURNS).write_bytes(whole[: random.randrange(len(whole))])
            async with gateway(folder=tmp_path) as client:
                status, shown = await client.operate("GET", f"/sessions/{opened['id']}")
                if status == 200:
                    said(await client.chat(opened, messages[: 1 + 2 * shown["num_turns"]]))
                    assert client.count("forks") == 0

    asyncio.run(main())


def test_what_has_ended_leaves_the_journal_at_the_next_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(folder=tmp_path) as client:
            opened, dropped = await client.open(), await client.open()
            for each in (opened, dropped):
                said(await client.chat(each, [{"role": "user", "content": "a" * 2000}]))
            await client.finish(opened)
            assert (await client.operate("DELETE", f"/sessions/{dropped['id']}"))[0] == 200
        async with gateway(folder=tmp_path) as client:
            assert (tmp_path / TURNS).stat().st_size < 1000
            assert (await client.operate("POST", "/sessions", {"session_id": opened["id"]}))[0] == 400
            assert len(await client.finish(opened)) == 1

    asyncio.run(main())


def test_a_long_journal_is_written_anew_and_a_first_entry_that_was_cut_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / TURNS).write_bytes(b"\x40\x00\x00\x00half of an en")

    def opened(number: int) -> SessionOpened:
        return SessionOpened(str(number), f"key {number}", number, 0.0, {"text": "x" * 100})

    first = FolderJournal(tmp_path, spare_bytes=1000)
    first.opened(opened(0))
    for number in range(1, 100):
        first.opened(opened(number))
        first.ends(str(number), number, [b"{}\n"])
        assert (tmp_path / TURNS).stat().st_size < 12_000
    first.close()
    second = FolderJournal(tmp_path)
    assert list(second.sessions) == ["0"]
    assert len(second.ended) == 99
    assert (tmp_path / SAMPLES).read_text() == "{}\n" * 99
    second.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_told_before_the_turn_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(folder=tmp_path) as client:
            opened = await client.open()
            journal = client.sessions.journal
            assert isinstance(journal, FolderJournal)
            journal._file.close()
            journal._file = full
            assert await client.chat(opened, [QUESTION]) == 500

    with Path("/dev/full").open("ab", buffering=0) as full:
        asyncio.run(main())


def test_a_folder_is_one_gateway_s_at_a_time(tmp_path: Path) -> None:
    first = FolderJournal(tmp_path)
    with pytest.raises(ConfigError, match="another gateway keeps its sessions there"):
        FolderJournal(tmp_path)
    first.close()
    FolderJournal(tmp_path).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="sessions cannot be kept there"):
        FolderJournal(tmp_path / "file")
