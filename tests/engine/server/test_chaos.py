"""Many clients at once that abort, disconnect, ask for too much and change the weights."""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from bench.hardening_server import attack
from bench.hardening_server import serving as start_server
from tests.engine.server.conftest import ClientOfAnother

NUM_CLIENTS, NUM_BODIES = 64, 100_000
CONTEXT_LENGTH = 128
VERSIONS = ["default", "v1"]
SERVING = {"num_slots": 8, "context_length": CONTEXT_LENGTH, "max_waiting": 60}
MAX_LOGPROB_ERROR = 1e-4


class Exchange(NamedTuple):
    """What was asked, and one response to it."""

    body: dict[str, Any]
    reply: Any


class Chaos:
    """What 64 clients do to a server, and what came back."""

    def __init__(
        self, client: Any, folders: dict[str, Path], *, seconds: float, kept: float = 1.0, is_alone: bool = True
    ) -> None:
        self._client = client
        self._folders = folders
        self._ends_at = asyncio.get_running_loop().time() + seconds
        self._kept = kept
        """Which part of the exchanges is kept to be scored; all are checked."""
        self._is_alone = is_alone
        """Whether nobody else names versions."""
        self.exchanges: list[Exchange] = []
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._live(Random(number)))
            group.create_task(self._steer(Random(-1)))

    def end(self) -> None:
        self._ends_at = 0.0

    def _goes_on(self) -> bool:
        return asyncio.get_running_loop().time() < self._ends_at

    async def _live(self, random: Random) -> None:
        actions = [self._ask, self._follow, self._leave, self._ask_too_much, self._abort]
        while self._goes_on():
            await random.choices(actions, [8, 2, 2, 1, 1])[0](random)

    async def _steer(self, random: Random) -> None:
        number = 0
        while self._goes_on():
            number += 1
            version = VERSIONS[number % 2]
            update = {
                "model_path": str(self._folders[version]),
                "weight_version": version,
                "abort_all_requests": random.random() < 0.1,
            }
            mode = random.choices(["in_place", "retract", "abort", None], [3, 3, 1, 3])[0]
            if mode is not None:
                await self._client.post("/pause_generation", {"mode": mode})
            await self._client.post("/update_weights_from_disk", update)
            await self._client.post("/continue_generation", {})
            self.counts["updates"] += 1
            await asyncio.sleep(random.random() * 0.5)

    def _body(self, random: Random) -> dict[str, Any]:
        prompt = [random.randrange(3, 250) for _ in range(random.randrange(1, 40))]
        sampling = {"max_new_tokens": random.randrange(1, 80), "n": random.choice([1, 1, 1, 3]), "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    def _asked(self, body: dict[str, Any]) -> Any:
        return self._client.session.post(self._client.address + "/generate", json=body)

    async def _take(self, body: dict[str, Any], response: Any, random: Random) -> None:
        """Keep a reply for the checks, or wait a little after a refusal."""
        assert response.status in (200, 429), await response.text()
        if response.status == 429:
            self.counts["refused"] += 1
            await asyncio.sleep(0.05)
            return
        reply = await response.json()
        replies = reply if isinstance(reply, list) else [reply]
        assert len(replies) == body["sampling_params"]["n"]
        for each in replies:
            self._note(Exchange(body, each), random)

    def _note(self, exchange: Exchange, random: Random) -> None:
        check(exchange, is_alone=self._is_alone)
        if random.random() < self._kept:
            self.exchanges.append(exchange)

    async def _ask(self, random: Random) -> None:
        body = self._body(random)
        async with self._asked(body) as response:
            await self._take(body, response, random)

    async def _follow(self, random: Random) -> None:
        body = {**self._body(random), "stream": True}
        body["sampling_params"]["n"] = 1
        async with self._asked(body) as response:
            if response.status != 200:
                await self._take(body, response, random)
                return
            *events, done, _ = (await response.text()).split("\n\n")
        assert done == "data: [DONE]"
        replies = [json.loads(event.removeprefix("data: ")) for event in events]
        for earlier, later in pairwise(replies):
            assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        self._note(Exchange(body, replies[-1]), random)
        self.counts["streams"] += 1

    async def _leave(self, random: Random) -> None:
        body = {**self._body(random), "stream": random.random() < 0.5}
        asked = asyncio.ensure_future(self._asked(body))
        await asyncio.wait([asked], timeout=random.random() * 0.1)
        asked.cancel()
        (response,) = await asyncio.gather(asked, return_exceptions=True)
        if not isinstance(response, BaseException):
            response.close()
        self.counts["disconnects"] += 1

    async def _ask_too_much(self, random: Random) -> None:
        await self._client.generate([5] * random.randrange(CONTEXT_LENGTH + 1, 2000), status=400)
        self.counts["over-long prompts"] += 1

    async def _abort(self, random: Random) -> None:
        body = {**self._body(random), "rid": f"rid{random.randrange(10**9)}"}
        asked = asyncio.ensure_future(self._asked(body))
        await asyncio.sleep(random.random() * 0.05)
        await self._client.post("/abort_request", {"rid": body["rid"]})
        async with await asked as response:
            await self._take(body, response, random)
        self.counts["aborts"] += 1


def spans_of(reply: Any) -> list[Any]:
    """The versions that have sampled a reply: first token, end, version."""
    return [[span["start"], span["end"], span["version"]] for span in reply["meta_info"]["weight_versions"]]


def check(exchange: Exchange, *, is_alone: bool) -> None:
    body, reply = exchange
    meta, ids = reply["meta_info"], reply["output_ids"]
    assert meta["prompt_tokens"] == len(body["input_ids"])
    assert meta["completion_tokens"] == len(ids)
    limit = body["sampling_params"]["max_new_tokens"]
    if meta["finish_reason"]["type"] == "length":
        assert meta["finish_reason"]["length"] == len(ids) == limit
    else:
        assert meta["finish_reason"]["type"] == "abort"
        assert len(ids) < limit
    if ids:
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
        assert all(entry[0] <= 0.0 for entry in meta["output_token_logprobs"])
    spans = spans_of(reply)
    starts, ends, versions = zip(*spans, strict=True)
    assert starts == (0, *ends[:-1])
    assert ends[-1] == len(ids)
    assert versions[-1] == meta["weight_version"]
    assert set(versions) <= set(VERSIONS) or not is_alone
    assert all(start < end for start, end in zip(starts, ends, strict=True)) or not ids
    assert all(one != next_one for one, next_one in pairwise(versions))


def to_be_scored(exchanges: Sequence[Exchange], version: str) -> Iterator[Exchange]:
    """Those that begin with tokens of a version.

    What later versions have sampled stands on keys and values of earlier ones, so that no scoring of
    the sequence gives its log-probabilities.
    """
    for exchange in exchanges:
        if exchange.reply["output_ids"] and spans_of(exchange.reply)[0][2] == version:
            yield exchange


async def rescore(client: Any, exchanges: Sequence[Exchange]) -> float:
    """Return how far at most the log-probabilities of first spans are from those of whole sequences."""
    ends = [spans_of(each.reply)[0][1] for each in exchanges]
    prompts = [each.body["input_ids"] for each in exchanges]
    body = {
        "input_ids": [
            prompt + each.reply["output_ids"][:end] for prompt, each, end in zip(prompts, exchanges, ends, strict=True)
        ],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": [len(prompt) - 1 for prompt in prompts],
    }
    worst = 0.0
    for each, end, scored in zip(exchanges, ends, await client.post("/generate", body), strict=True):
        own = [entry[0] for entry in each.reply["meta_info"]["output_token_logprobs"][:end]]
        expected = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]]
        assert len(own) == len(expected)
        worst = max([worst, *(abs(one - other) for one, other in zip(own, expected, strict=True))])
    return worst


async def verify(client: Any, chaos: Chaos, folders: dict[str, Path]) -> None:
    """Check that all that was meant to happen did, every reply, and that no slot is taken before or after."""
    await until_empty(client)
    for kind in ("updates", "streams", "disconnects", "over-long prompts", "aborts", "refused"):
        assert chaos.counts[kind] > 0, kind
    assert {each.reply["meta_info"]["finish_reason"]["type"] for each in chaos.exchanges} == {"length", "abort"}
    assert any(len(spans_of(each.reply)) > 1 for each in chaos.exchanges)
    for version in VERSIONS:
        await client.post("/update_weights_from_disk", {"model_path": str(folders[version]), "weight_version": version})
        chosen = list(to_be_scored(chaos.exchanges, version))
        assert chosen
        for first in range(0, len(chosen), 32):
            assert await rescore(client, chosen[first : first + 32]) < MAX_LOGPROB_ERROR
    await until_empty(client)


async def until_empty(client: Any) -> None:
    """Wait until no slot is taken, which takes a step at most after the last reply."""
    await asyncio.wait_for(client.until_idle(), 300)
    assert (await client.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0


@pytest.fixture
def folders(tiny_checkpoint: Path, other_weights: Path) -> dict[str, Path]:
    return dict(zip(VERSIONS, [tiny_checkpoint, other_weights], strict=True))


async def test_every_reply_is_consistent_and_every_slot_free_afterwards(
    serving: Any, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(**SERVING) as client:
        chaos = Chaos(client, folders, seconds=4.0)
        await asyncio.wait_for(chaos.run(), 300)
        await verify(client, chaos, folders)
    assert caplog.records == []


@pytest.mark.soak
async def test_it_goes_on_for_two_minutes_in_the_same_memory(serving_apart: Any, folders: dict[str, Path]) -> None:
    async with serving_apart(**SERVING) as client:
        chaos = Chaos(client, folders, seconds=120.0)
        running = asyncio.create_task(chaos.run())
        await asyncio.wait([running], timeout=20)
        settled = resident_bytes(client.process_id)
        await asyncio.wait_for(running, 130)
        await until_empty(client)
        assert resident_bytes(client.process_id) < 1.05 * settled
        await verify(client, chaos, folders)
    assert client.log == ""


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_beside_random_bodies_it_stays_alive_and_answers_in_the_same_memory(folders: dict[str, Path]) -> None:
    async with start_server(folders[VERSIONS[0]]) as server:
        client = ClientOfAnother(server.session, server.address, server.process.pid)
        before = await server.answer()
        chaos = Chaos(client, folders, seconds=math.inf, kept=0.05, is_alone=False)
        running = asyncio.create_task(chaos.run())
        found = await attack(server, NUM_BODIES, seed=1)
        chaos.end()
        await asyncio.wait_for(running, 300)
        await server.post("/continue_generation", b"{}")
        await verify(client, chaos, folders)
        await client.post("/update_weights_from_disk", {"model_path": str(server.model), "weight_version": VERSIONS[0]})
        assert await server.answer() == before
        assert found["holds"], found
        assert server.log == []


def resident_bytes(process_id: int) -> int:
    text = Path(f"/proc/{process_id}/statm").read_text()
    return int(text.split()[1]) * resource.getpagesize()
