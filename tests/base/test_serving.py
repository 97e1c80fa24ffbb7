from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from rollfeed.base.serving import PROMETHEUS_TYPE, prometheus_text, serve_application
from rollfeed.errors import ConfigError


async def _metrics(_request: web.Request) -> web.Response:
    families = [GaugeMetricFamily("a_b", "Things.", 2), CounterMetricFamily("c", "Calls.", 3)]
    return web.Response(body=prometheus_text(families), headers={"Content-Type": PROMETHEUS_TYPE})


def application() -> web.Application:
    made = web.Application()
    made.add_routes([web.get("/metrics", _metrics)])
    return made


async def test_an_application_is_served_while_the_block_runs() -> None:
    async with aiohttp.ClientSession() as session:
        async with (
            serve_application(application(), host="127.0.0.1", port=0) as address,
            session.get(f"{address}/metrics") as reply,
        ):
            assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            lines = (await reply.text()).splitlines()
        assert lines == [
            *("# HELP a_b Things.", "# TYPE a_b gauge", "a_b 2.0"),
            *("# HELP c_total Calls.", "# TYPE c_total counter", "c_total 3.0"),
        ]
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{address}/metrics")


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no addresses of version 6")
async def test_an_address_of_version_6_can_be_asked_as_it_is_given() -> None:
    async with (
        serve_application(application(), host="::1", port=0) as address,
        aiohttp.ClientSession() as session,
        session.get(f"{address}/metrics") as reply,
    ):
        assert reply.status == 200


async def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    async with serve_application(application(), host="127.0.0.1", port=0) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(
            ConfigError, match=f"port = {port}: cannot listen on 127.0.0.1:{port} .*; choose another port"
        ):
            async with serve_application(application(), host="127.0.0.1", port=port):
                pass
