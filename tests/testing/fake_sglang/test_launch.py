"""Fakes in a process of their own."""

from __future__ import annotations

import os
from typing import Any

import aiohttp
import pytest

from rollfeed.errors import ConfigError
from rollfeed.testing.fake_sglang import ScriptedReply, ServerFault, fake_settings, start_fake_sglang
from rollfeed.testing.held_port import hold_port


async def test_it_runs_in_another_process_that_ends_with_the_block(client: Any) -> None:
    async with start_fake_sglang(
        mode="scripted", num_workers=2, router="new", script=[ScriptedReply(output_ids=[5, 2], text="hi")]
    ) as fakes:
        assert fakes.process is not None
        assert fakes.process.pid != os.getpid()
        assert fakes.address == fakes.router_address
        assert (await client.generate(fakes.address))["text"] == "hi"
        await fakes.extend_script(ScriptedReply(output_ids=[6], text="more"), worker=1)
        assert (await client.generate(fakes.addresses[1]))["text"] == "hi"
        assert (await client.generate(fakes.addresses[1]))["text"] == "more"
        assert (await fakes.requests(1))[0]["input_ids"] == [3, 1, 2]
    assert fakes.process.returncode is not None
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get(fakes.addresses[0] + "/health")


async def test_dying_ends_the_process_with_code_1(client: Any) -> None:
    async with start_fake_sglang(faults=[ServerFault(kind="die", path="/generate")]) as fakes:
        assert fakes.process is not None
        assert await client.get(fakes.address + "/health") == ""
        with pytest.raises(aiohttp.ClientError):
            await client.generate(fakes.address)
        assert await fakes.process.wait() == 1


async def test_it_can_be_killed_and_started_again_on_the_same_port(client: Any) -> None:
    async with start_fake_sglang() as fakes:
        assert fakes.process is not None
        fakes.kill()
        await fakes.process.wait()
        port = int(fakes.address.rsplit(":", 1)[1])
        with hold_port(port=port):
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(fakes.address + "/health")
            async with start_fake_sglang(port=port) as again:
                assert again.address == fakes.address
                assert await client.get(fakes.address + "/health") == ""


async def test_a_router_runs_alone_in_front_of_servers_that_run_already(client: Any) -> None:
    async with (
        start_fake_sglang() as fakes,
        start_fake_sglang(num_workers=0, router="old", worker_urls=[fakes.address]) as routing,
    ):
        assert routing.addresses == ()
        assert await client.get(f"{routing.address}/list_workers") == {"urls": [fakes.address]}
        assert len((await client.generate(routing.address, max_new_tokens=3))["output_ids"]) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "fast"},
        {"num_workers": 0},
        {"router": "newest"},
        {"worker_urls": ["http://127.0.0.1:9"]},
        {"policy": "random"},
        {"speed": 0.0},
        {"port": 70_000},
        {"unheard_of": 1},
        {"time_model": {"num_slots": 0}},
        {"faults": [{"kind": "status", "status": 200}]},
        {"script": [{"output_ids": [1], "logprobs": []}]},
        {"script": [{"finish_reason": "bored"}]},
    ],
)
def test_wrong_settings_are_refused_in_one_line(fields: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        fake_settings(**fields)
    assert "\n" not in str(caught.value)
