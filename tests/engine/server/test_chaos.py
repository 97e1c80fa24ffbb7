"""Many clients at once that abort, disconnect, ask for too much and change the weights."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

NUM_CLIENTS = 64
CONTEXT_LENGTH = 128
VERSIONS = ["default", "v1"]


class Chaos:
    """What 64 clients do to a server, and what came back."""

    def __init__(self, client: Any, folders: dict[str, Path], *, seconds: float) -> None:
        self._client = client
        self._folders = folders
        self._ends_at = asyncio.get_running_loop().time() + seconds
        self.replies: list[tuple[list[int], Any]] = []
        self.num_refused = 0
        self.num_left = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._live(Random(number)))
            group.create_task(self._steer(Random(-1)))

    def _goes_on(self) -> bool:
        return asyncio.get_running_loop().time() < self._ends_at

    async def _live(self, random: Random) -> None:
        while self._goes_on():
            await random.choices([self._ask, self._leave, self._ask_too_much, self._abort], [10, 2, 1, 1])[0](random)

    async def _steer(self, random: Random) -> None:
        number = 0
        while self._goes_on():
            number += 1
            version = VERSIONS[number % 2]
            update = {
                "model_path": str(self._folders[version]),
                "weight_version": version,
                "abort_all_requests": random.random() < 0.3,
            }
            mode = random.choice(["in_place", "retract", "abort", None])
            if mode is not None:
                await self._client.post("/pause_generation", {"mode": mode})
            await self._client.post("/update_weights_from_disk", update)
            await self._client.post("/continue_generation", {})
            await asyncio.sleep(random.random() * 0.2)

    def _body(self, random: Random) -> dict[str, Any]:
        prompt = [random.randrange(3, 250) for _ in range(random.randrange(1, 40))]
        sampling = {"max_new_tokens": random.randrange(1, 80), "n": random.choice([1, 1, 1, 3]), "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    async def _ask(self, random: Random) -> None:
        body = self._body(random)
        async with self._client.session.post(self._client.address + "/generate", json=body) as response:
            assert response.status in (200, 429), await response.text()
            reply = await response.json()
        if response.status == 429:
            self.num_refused += 1
            await asyncio.sleep(0.05)
            return
        replies = reply if isinstance(reply, list) else [reply]
        assert len(replies) == body["sampling_params"]["n"]
        self.replies += [(body["input_ids"], each) for each in replies]

    async def _leave(self, random: Random) -> None:
        body = {**self._body(random), "stream": random.random() < 0.5}
        asked = asyncio.ensure_future(self._client.session.post(self._client.address + "/generate", json=body))
        await asyncio.wait([asked], timeout=random.random() * 0.1)
        asked.cancel()
        (response,) = await asyncio.gather(asked, return_exceptions=True)
        if not isinstance(response, BaseException):
            response.close()
        self.num_left += 1

    async def _ask_too_much(self, random: Random) -> None:
        await self._client.generate([5] * random.randrange(CONTEXT_LENGTH + 1, 2000), status=400)

    async def _abort(self, random: Random) -> None:
        rid = f"rid{random.randrange(10**9)}"
        asked = asyncio.ensure_future(
            self._client.session.post(self._client.address + "/generate", json={**self._body(random), "rid": rid})
        )
        await asyncio.sleep(random.random() * 0.05)
        await self._client.post("/abort_request", {"rid": rid})
        async with await asked as response:
            assert response.status in (200, 429)


def check(prompt: list[int], reply: Any) -> None:
    meta, ids = reply["meta_info"], reply["output_ids"]
    assert meta["prompt_tokens"] == len(prompt)
    assert meta["completion_tokens"] == len(ids)
    assert len(prompt) + len(ids) <= CONTEXT_LENGTH
    assert meta["finish_reason"]["type"] in ("length", "abort")
    assert meta["weight_version"] in VERSIONS
    if ids:
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
        assert all(entry[0] <= 0.0 for entry in meta["output_token_logprobs"])
    spans = meta.get("weight_version_spans", [[0, len(ids), meta["weight_version"]]])
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
    assert spans[-1][1:] == [len(ids), meta["weight_version"]]


def of_one_version(replies: list[tuple[list[int], Any]], version: str) -> Iterator[tuple[list[int], Any]]:
    """Replies that one version has sampled whole."""
    for prompt, reply in replies:
        meta = reply["meta_info"]
        if reply["output_ids"] and meta["weight_version"] == version and "weight_version_spans" not in meta:
            yield prompt, reply


async def rescored(client: Any, prompt: list[int], reply: Any) -> None:
    body = {
        "input_ids": prompt + reply["output_ids"],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
    }
    scored = (await client.post("/generate", body))["meta_info"]["input_token_logprobs"][1:]
    own = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert own == pytest.approx([entry[0] for entry in scored], abs=2e-4)


async def endure(client: Any, folders: dict[str, Path], *, seconds: float, num_rescored: int) -> None:
    chaos = Chaos(client, folders, seconds=seconds)
    await asyncio.wait_for(chaos.run(), seconds + 30)
    await client.until_idle()
    assert client.service.engine.num_running == 0
    assert chaos.num_left > 0
    assert len(chaos.replies) > NUM_CLIENTS
    for prompt, reply in chaos.replies:
        check(prompt, reply)
    for version in VERSIONS:
        await client.post("/update_weights_from_disk", {"model_path": str(folders[version]), "weight_version": version})
        chosen = list(of_one_version(chaos.replies, version))[-num_rescored:]
        assert chosen
        for prompt, reply in chosen:
            await rescored(client, prompt, reply)


@pytest.fixture
def folders(tiny_checkpoint: Path, other_weights: Path) -> dict[str, Path]:
    return dict(zip(VERSIONS, [tiny_checkpoint, other_weights], strict=True))


async def test_every_reply_is_consistent_and_every_slot_free_afterwards(
    serving: Any, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(num_slots=8, context_length=CONTEXT_LENGTH, max_waiting=60) as client:
        await endure(client, folders, seconds=4.0, num_rescored=100)
    assert caplog.records == []


@pytest.mark.soak
async def test_it_goes_on_for_two_minutes_in_the_same_memory(serving: Any, folders: dict[str, Path]) -> None:
    async with serving(num_slots=8, context_length=CONTEXT_LENGTH, max_waiting=60) as client:
        await endure(client, folders, seconds=20.0, num_rescored=200)
        before = resident_bytes()
        for _ in range(5):
            await endure(client, folders, seconds=20.0, num_rescored=200)
        assert resident_bytes() < 1.05 * before


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
