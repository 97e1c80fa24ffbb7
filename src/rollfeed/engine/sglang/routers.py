"""Routers, in the two dialects that SGLang's have spoken, and telling them from plain servers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from urllib.parse import quote

from rollfeed.engine.http import ControlReply, Http, error_message
from rollfeed.errors import EngineProtocolError

_OLD_LIST = "/list_workers"
_WORKERS = "/workers"


class Dialect(StrEnum):
    """How a router lists, adds and removes workers."""

    OLD = "old"
    """``/list_workers``, ``/add_worker?url=``, ``/remove_worker?url=``."""
    NEW = "new"
    """``GET /workers``, ``POST /workers``, ``DELETE /workers/{id}``."""


class Router:
    """The workers behind one router."""

    def __init__(self, address: str, dialect: Dialect, *, http: Http) -> None:
        self.address = address
        self.dialect = dialect
        self._http = http

    async def workers(self) -> Mapping[str, str]:
        """Return the router's id of each worker, by address; in the old dialect the two are the same.

        Raises:
            EngineUnavailableError: If the router does not answer.
            EngineProtocolError: If it answers with something else.
        """
        path = _OLD_LIST if self.dialect is Dialect.OLD else _WORKERS
        reply = await self._http.control("GET", self.address + path)
        found = _listed(reply, self.dialect)
        if found is None:
            raise EngineProtocolError(f"{self.address}{path}: HTTP {reply.status}: {error_message(reply.content)}")
        return found

    async def add(self, worker_address: str) -> None:
        """Let a worker have requests; raises as :meth:`workers`."""
        if self.dialect is Dialect.OLD:
            url = f"{self.address}/add_worker?url={quote(worker_address, safe='')}"
            self._check(url, await self._http.control("POST", url))
        else:
            url = self.address + _WORKERS
            self._check(url, await self._http.control("POST", url, {"url": worker_address}))

    async def remove(self, worker_address: str) -> None:
        """Keep requests from a worker, if it is listed; raises as :meth:`workers`."""
        router_id = (await self.workers()).get(worker_address)
        if router_id is None:
            return
        if self.dialect is Dialect.OLD:
            url = f"{self.address}/remove_worker?url={quote(worker_address, safe='')}"
            self._check(url, await self._http.control("POST", url))
        else:
            url = f"{self.address}{_WORKERS}/{quote(router_id, safe='')}"
            self._check(url, await self._http.control("DELETE", url))

    def _check(self, url: str, reply: ControlReply) -> None:
        if not 200 <= reply.status < 300:
            raise EngineProtocolError(f"{url}: HTTP {reply.status}: {error_message(reply.content)}")


async def find_dialect(address: str, *, http: Http) -> Dialect | None:
    """Return which router answers at an address; None for anything else that answers.

    Raises:
        EngineUnavailableError: If nothing answers.
    """
    for dialect, path in ((Dialect.NEW, _WORKERS), (Dialect.OLD, _OLD_LIST)):
        if _listed(await http.control("GET", address + path), dialect) is not None:
            return dialect
    return None


def _listed(reply: ControlReply, dialect: Dialect) -> dict[str, str] | None:
    if reply.status != 200:
        return None
    content = reply.json()
    if dialect is Dialect.OLD:
        urls = content.get("urls")
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            return None
        return {url.rstrip("/"): url for url in urls}
    workers = content.get("workers")
    if not isinstance(workers, list):
        return None
    return {
        each["url"].rstrip("/"): str(each.get("id", each["url"]))
        for each in workers
        if isinstance(each, dict) and isinstance(each.get("url"), str)
    }
