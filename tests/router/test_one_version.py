"""Whatever happens to workers and weights, a reply is of one version, and of none that was replaced before."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.router.routing_fakes import Routed, routed

from rollfeed.testing.fake_sglang import Fakes, serve_fake_sglang

NUM_CLIENTS, NUM_EVENTS = 8, 30
MODEL = {"num_slots": 4, "step_ms": 1.0, "step_ms_per_request": 0.0, "median_length": 20.0, "max_length": 60}
DISK = "/update_weights_from_disk"


class Client:
    """Asks one request after another, and checks each reply."""

    def __init__(self, router: Routed, number: int) -> None:
        self._router = router
        self._number = number
        self.newest = 0
        """Version that has stood since before the next request."""
        self.num_replies = 0
        self.rid = ""

    async def ask(self, turn: int) -> None:
        self.rid = f"{self._number}-{turn}"
        newest = self.newest
        reply = await self._router.generate(range(self._number, self._number + 20), 60, rid=self.rid)
        if reply.status != 200:
            return
        meta: dict[str, Any] = reply.json["meta_info"]
        told = {span["version"] for span in meta.get("weight_versions", ()) if span["end"] > span["start"]}
        told.add(meta["weight_version"])
        assert len(told) == 1, f"{self.rid} crosses {told}"
        version = told.pop()
        assert (0 if version == "default" else int(version)) >= newest
        self.num_replies += 1


async def happen(router: Routed, fakes: Fakes, clients: list[Client], draw: random.Random, number: int) -> None:
    """Let something happen to the fleet, and wait until it has."""
    worker = draw.randrange(len(fakes.servers))
    match draw.choice(["update", "update", "failed update", "abort", "abort", "death", "abort all", "flush"]):
        case "update" | "failed update" as kind:
            if kind == "failed update":
                await fakes.add_fault("status", path=DISK, times=1, worker=worker)
            body = {
                "model_path": f"/w/{number}",
                "weight_version": str(number),
                "abort_all_requests": draw.random() < 0.7,
            }
            told = await router.post(DISK, **body)
            if told.status == 200:
                for client in clients:
                    client.newest = number
        case "abort":
            await router.post("/abort_request", rid=draw.choice(clients).rid)
        case "abort all":
            await router.post("/abort_request", abort_all=True)
        case "flush":
            await router.post("/flush_cache")
        case "death":
            if sum(member.state.value == "ready" for member in router.fleet) > 1:
                fakes.servers[worker].die()
                await asyncio.sleep(draw.random() * 0.1)
                await fakes.servers[worker].restart()


@pytest.mark.parametrize(("seed", "release"), [(0, "0.5.23"), (1, "0.5.23"), (2, "0.5.15"), (3, "0.5.15")])
async def test_no_reply_crosses_a_version(seed: int, release: str) -> None:
    """An old server dies of an update while anything runs, so that it is seen whether something does."""
    draw = random.Random(seed)
    async with (
        serve_fake_sglang(mode="time-model", num_workers=3, time_model=MODEL, release=release) as fakes,
        routed(fakes.addresses, max_tries=20, drain_seconds=5.0) as router,
    ):
        clients = [Client(router, number) for number in range(NUM_CLIENTS)]
        is_over = asyncio.Event()

        async def keep_asking(client: Client) -> None:
            turn = 0
            while not is_over.is_set():
                await client.ask(turn)
                turn += 1

        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(keep_asking(client))
            for number in range(1, NUM_EVENTS + 1):
                await happen(router, fakes, clients, draw, number)
                await asyncio.sleep(draw.random() * 0.03)
            is_over.set()
        assert sum(client.num_replies for client in clients) >= NUM_CLIENTS
        assert router.fleet.counters["crossing_replies"] == 0
        assert [member.num_requests for member in router.fleet] == [0, 0, 0]
        assert not router.fleet.transfers
        assert not router.fleet.owners
        # All come back, with the weights that stand; one that has died and is there again may not have been asked yet.
        version = router.fleet.policy_version
        standing = [str(version) if version else "default"] * 3
        await router.until(lambda: [server.weight_version for server in fakes.servers] == standing)
        await router.until(lambda: len(router.fleet.ready) == 3)
