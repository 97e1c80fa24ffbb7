"""The page and what it asks for, over HTTP on loopback; everything is read, nothing is written.

No other page may ask or read an answer. What a run holds is shown as text, and nothing but the page's own script is
run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from multidict import MultiMapping

from rollfeed.errors import RollfeedError, in_one_line
from rollfeed.viewer.found_runs import find_runs, list_line, problem_of, version_of
from rollfeed.viewer.one_file import ASSETS, html, read_asset
from rollfeed.viewer.overviews import overview
from rollfeed.viewer.sample_rows import sample_rows
from rollfeed.viewer.token_texts import RunTokenizers
from rollfeed.viewer.whole_sample import whole_sample

LOOPBACK = "127.0.0.1"
_AT_ONCE, _MOST_ROWS = 4, 10_000
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_log = logging.getLogger("rollfeed.view")


class ViewServer:
    """Answers for the runs of some folders, those that come later included.

    Raises:
        ConfigError: If there is no run in one of them.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._runs = find_runs(folders)
        self._overviews: dict[str, tuple[str, bytes]] = {}
        self._lines: dict[str, tuple[str, dict[str, Any]]] = {}
        self._tokenizers = RunTokenizers()
        self._places = asyncio.Semaphore(_AT_ONCE)

    def application(self) -> web.Application:
        application = web.Application(middlewares=[_kept_apart])
        application.router.add_get("/", self._page)
        for name in ASSETS:
            application.router.add_get(f"/{name}", partial(self._asset, name))
        for path, answer in {
            "runs": self._list,
            "run": self._overview,
            "samples": self._samples,
            "sample": self._sample,
        }.items():
            application.router.add_get(f"/api/{path}", partial(self._answered, answer))
        return application

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=html(), content_type="text/html")

    async def _asset(self, name: str, request: web.Request) -> web.Response:
        return web.Response(text=read_asset(name), content_type=_TYPES[Path(name).suffix], charset="utf-8")

    async def _answered(self, answer: Callable[[MultiMapping[str]], Any], request: web.Request) -> web.Response:
        """Answer in a thread, as files are read; what cannot be answered is one line."""
        async with self._places:
            try:
                body = await asyncio.to_thread(answer, request.query)
                return web.Response(body=_encoded(body), content_type="application/json")
            except Exception as error:  # whatever is wrong with one run, the page goes on
                if not isinstance(error, RollfeedError):
                    _log.warning("%s: %s", request.path_qs, in_one_line(error))
                text = _encoded({"error": problem_of(error)})
                return web.Response(status=422, body=text, content_type="application/json")

    def _path(self, query: MultiMapping[str]) -> tuple[str, Path]:
        name = query.get("run", "")
        if name not in self._runs:
            raise RollfeedError(f"there is no run {name!r} here")
        return name, self._runs[name]

    def _list(self, query: MultiMapping[str]) -> list[dict[str, Any]]:
        try:
            self._runs = find_runs(self._folders)
        except RollfeedError as error:  # a folder has gone; what is known of it says so
            _log.warning("%s", error)
        lines = []
        for name, path in self._runs.items():
            version = version_of(path)
            if self._lines.get(name, ("",))[0] != version:
                self._lines[name] = (version, list_line(name, path))
            lines.append(self._lines[name][1])
        return lines

    def _overview(self, query: MultiMapping[str]) -> bytes | dict[str, Any]:
        name, path = self._path(query)
        version = version_of(path)  # before the run is read: what comes in between is another version
        if query.get("version") == version:
            return {"version": version}
        if self._overviews.get(name, ("",))[0] != version:
            self._overviews[name] = (version, _encoded({"version": version, **overview(name, path)}))
        return self._overviews[name][1]

    def _samples(self, query: MultiMapping[str]) -> dict[str, Any]:
        _, path = self._path(query)
        filters = [text for text in query.getall("filter", []) if text.strip()]
        num = min(max(1, int(query.get("num", 200))), _MOST_ROWS)
        found = sample_rows(path, *filters, num=num, worst=query.get("order") == "worst")
        self._tokenizers.begin(path)
        return found

    def _sample(self, query: MultiMapping[str]) -> dict[str, Any]:
        return whole_sample(self._path(query)[1], query.get("id", ""), self._tokenizers)


def _encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)


@web.middleware
async def _kept_apart(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=f"{error.reason}\n")
    response.headers.update(_HEADERS)
    return response
