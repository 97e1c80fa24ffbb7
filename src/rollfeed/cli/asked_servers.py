"""Asks servers for ``rollfeed check --servers``: each for its model, and for a few tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollfeed.app import Model
from rollfeed.config import RunSpec, Settings
from rollfeed.engine.client import Dialect
from rollfeed.engine.client.dialect import Context
from rollfeed.engine.client.flights import Flight, Worker
from rollfeed.engine.client.replies import Found, Reply
from rollfeed.engine.dialects import DIALECTS, SGLang
from rollfeed.engine.http import Http, TryFailedError
from rollfeed.engine.teachers import ServedTeacher
from rollfeed.errors import ConfigError, EngineError
from rollfeed.rewards.judging import Judges
from rollfeed.types.text import counted

_TEXT = "Add 12 and 34, and say why."
_NUM_TOKENS = 8
_SECONDS = 10.0
"""For which a teacher is waited."""
_ABSENT = (404, 501)
"""Statuses of routes that a server does not have; of one that wants a POST it is another."""
_ROUTES = {
    "engine.sglang": {
        "disk": "/update_weights_from_disk",
        "tensors": "/update_weights_from_tensor",
        "nccl": "/update_weights_from_distributed",
    },
    "engine.openai": {"disk": "/collective_rpc", "tensors": "/update_weights", "nccl": "/update_weights"},
}
"""By which weights come, by the setting of the servers and their transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """The answers of one server."""

    address: str
    told: tuple[str, ...] = ()
    """Its model, version, tokens and so on, for people."""
    problems: tuple[str, ...] = ()
    """Reasons why a run could not use it, each with its address."""


def ask_servers(settings: Settings, model: Model) -> list[ServerAnswer]:
    """Return what each server of the settings answers; those behind a router, too.

    Raises:
        ConfigError: If the settings name none.
        EngineError: If the router does not answer, or is none.
    """
    engine = settings.engine
    if not engine.servers:
        raise ConfigError("--servers: the embedded engine answers here; there are no servers to ask")
    if engine.launch is not None:
        raise ConfigError("--servers: the run starts these servers itself ([engine.launch]); there are none yet")
    (name, servers), *_ = engine.servers.items()
    dialect = DIALECTS[name](servers) if engine.sglang is None else SGLang(engine.sglang, with_text=True)
    return asyncio.run(_ask_all(dialect, settings, model))


def ask_judges(spec: RunSpec) -> list[str]:
    """Return the judges of a run, each of which has answered in the form of its verdicts.

    Raises:
        ConfigError: If one has not.
    """
    judges = Judges(spec.settings.reward, folders=spec.folders)

    async def ask() -> None:
        async with judges:
            pass

    asyncio.run(ask())
    return list(judges.by_rm_type)


def ask_teacher(settings: Settings, model: Model) -> Sequence[str]:
    """Return the servers of the teacher, each of which has scored a text; none where it is on none.

    Raises:
        ConfigError: If the variable that should hold the key does not.
        EngineError: If one does not answer, makes other tokens than the policy's tokenizer, or does not score.
    """
    taught = settings.teacher
    if taught is None or not taught.servers:
        return ()
    at_once = taught.model_copy(update={"startup_timeout_seconds": min(taught.startup_timeout_seconds, _SECONDS)})

    async def ask() -> None:
        length = settings.max_context_length
        async with ServedTeacher(at_once, tokenizer=model.tokenizer, context_length=length) as teacher:
            await teacher.check()

    asyncio.run(ask())
    return taught.servers


async def _ask_all(dialect: Dialect, settings: Settings, model: Model) -> list[ServerAnswer]:
    seconds = dialect.settings.control_timeout_seconds
    async with Http(api_key=dialect.api_key, max_connections=8, control_timeout_seconds=seconds) as http:
        dialect.open(Context(http, model.tokenizer, settings.engine.context_length))
        router = await dialect.find_router()
        addresses = dialect.settings.addresses if router is None else tuple(await router.workers())
        asked = (_ask(each, dialect, settings, model, http, router is not None) for each in addresses)
        return list(await asyncio.gather(*asked))


async def _ask(
    address: str, dialect: Dialect, settings: Settings, model: Model, http: Http, is_behind_router: bool
) -> ServerAnswer:
    told: list[str] = []
    problems: list[str] = []
    try:
        found = await dialect.meet(address, is_behind_router=is_behind_router)
        card = await _card(address, settings, http)
        told += _about(found, card)
        reply = await _sample(address, dialect, settings, model, http)
        has_logprobs = len(reply.token_ids) > 0 and bool(np.isfinite(reply.logprobs).all())
        told.append(f"{counted(len(reply.token_ids), 'token')}{' with logprobs' if has_logprobs else ''}")
        if dialect.is_exact and not has_logprobs:
            problems.append("returns no tokens with logprobs, so that nothing can be trained on it")
        told.append(_compared_texts(reply, settings, model))
        if await _tokenises_otherwise(address, card, model, http):
            problems.append(f"its tokens are not those of the tokenizer in {model.checkpoint}: serve the same model")
        if settings.trains or settings.weights.directory is not None:
            transport = dialect.settings.weights_transport
            route = _ROUTES[dialect.setting].get(transport)
            if route and (await http.control("GET", address + route)).status in _ABSENT:
                problems.append(f"has no {route}, by which new weights come (docs/engines.md)")
            else:
                told.append("takes weights" if route else f"weights by {transport} not asked for")
    except (EngineError, TryFailedError, TimeoutError) as error:
        problems.append(str(error) or "no answer in time")
    lines = tuple(each if each.startswith(address) else f"{address}: {each}" for each in problems)
    return ServerAnswer(address=address, told=tuple(told), problems=lines)


async def _sample(address: str, dialect: Dialect, settings: Settings, model: Model, http: Http) -> Reply:
    params = replace(settings.sampling.params, max_new_tokens=_NUM_TOKENS, min_new_tokens=0, seed=0)
    dialect.check(params)
    prompt_ids = np.asarray(model.tokenizer.encode(_TEXT, add_special_tokens=False), np.int32)
    flight = Flight(request_id="rollfeed-check", prompt_ids=prompt_ids, params=params)
    flight.rid = flight.request_id
    request = dialect.request(flight, Worker(address))
    async with asyncio.timeout(dialect.settings.control_timeout_seconds):
        content = await http.generate(address, request.path, request.body, events=request.answer.take)
    if content is not None:
        request.answer.take(content)
    return request.answer.reply()


async def _card(address: str, settings: Settings, http: Http) -> dict[str, object]:
    """Return what a server says of the model that the settings name, or of its first; nothing where it lists none."""
    listed = (await http.control("GET", f"{address}/v1/models")).json().get("data")
    cards = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    name = None if settings.engine.openai is None else settings.engine.openai.model
    return next((each for each in cards if name in (None, each.get("id"))), {})


def _about(found: Found, card: dict[str, object]) -> list[str]:
    told = [str(found.model_path or card.get("id", "a model without a name"))]
    told.append("no version" if found.policy_version is None else f"version {found.policy_version}")
    if found.precision != "unknown":
        told.append(found.precision)
    if "max_model_len" in card:
        told.append(f"context of {card['max_model_len']} tokens")
    return told


async def _tokenises_otherwise(address: str, card: dict[str, object], model: Model, http: Http) -> bool:
    """Return whether a server makes other tokens of a text; those without a route for it are not found out."""
    body = {"model": card.get("id"), "prompt": _TEXT, "add_special_tokens": False}
    tokens = (await http.control("POST", f"{address}/tokenize", body)).json().get("tokens")
    return isinstance(tokens, list) and tokens != list(model.tokenizer.encode(_TEXT, add_special_tokens=False))


def _compared_texts(reply: Reply, settings: Settings, model: Model) -> str:
    """Say whether a server makes the same text of tokens, as far as it sends both; it may leave out half a letter."""
    if reply.text is None or not reply.is_exact:
        return "text not compared"
    skips = settings.sampling.rollout_skip_special_tokens
    texts = (reply.text, model.tokenizer.decode(reply.token_ids, skip_special_tokens=skips))
    theirs, ours = (text.replace("\ufffd", "").strip() for text in texts)
    return "text as ours" if ours == theirs else f"text {theirs!r}, which is {ours!r} here"
