"""Routers, in the two forms that SGLang's have had, and telling them from plain servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rollfeed.engine.http import ControlReply, Http
from rollfeed.errors import EngineProtocolError

_NEW, _OLD = "/workers", "/list_workers"
"""Where a router lists its workers. A new one changes the list there, an old one at ``/add_worker`` and the like."""


class SGLangRouter:
    """The workers behind one router."""

    def __init__(self, address: str, list_path: str, *, http: Http) -> None:
        self.address = address
        self._list_path = list_path
        self._http = http

    async def workers(self) -> Mapping[str, str]:
        """Return the router's id of each worker, by address; of an old one the two are the same.

        Raises:
            EngineUnavailableError: If the router does not answer.
            EngineProtocolError: If it answers with something else.
        """
        url = self.address + self._list_path
        reply = await self._http.control("GET", url)
        found = _listed(reply)
        if found is None:
            raise EngineProtocolError(f"{url}: {reply.error}")
        return found

    async def add(self, worker_address: str) -> None:
        if self._list_path == _OLD:
            await self._change("POST", f"/add_worker?url={quote(worker_address, safe='')}")
        else:
            await self._change("POST", _NEW, {"url": worker_address})

    async def remove(self, worker_address: str) -> None:
        router_id = (await self.workers()).get(worker_address)
        if router_id is None:
            return
        if self._list_path == _OLD:
            await self._change("POST", f"/remove_worker?url={quote(worker_address, safe='')}")
        else:
            await self._change("DELETE", f"{_NEW}/{quote(router_id, safe='')}")

    async def _change(self, method: str, path: str, body: Any = None) -> None:
        reply = await self._http.control(method, self.address + path, body)
        if not 200 <= reply.status < 300:
            raise EngineProtocolError(f"{self.address}{path}: {reply.error}")


async def find_router(address: str, *, http: Http) -> SGLangRouter | None:
    """Return the router that answers at an address; None for anything else that answers.

    Raises:
        EngineUnavailableError: If nothing answers.
    """
    for path in (_NEW, _OLD):
        if _listed(await http.control("GET", address + path)) is not None:
            return SGLangRouter(address, path, http=http)
    return None


def _listed(reply: ControlReply) -> dict[str, str] | None:
    content = reply.json() if reply.status == 200 else {}
    urls, workers = content.get("urls"), content.get("workers")
    if isinstance(urls, list) and all(isinstance(url, str) for url in urls):
        return {url.rstrip("/"): url for url in urls}
    if not isinstance(workers, list):
        return None
    told = [each for each in workers if isinstance(each, dict) and isinstance(each.get("url"), str)]
    return {each["url"].rstrip("/"): str(each.get("id", each["url"])) for each in told}
