"""The reward hub over HTTP.

``POST /`` and ``POST /get_reward`` take one response or many, in either form:

- ``{"response", "label", "prompt"?, "rm_type"?, "metadata"?, "reward_key"?}``, or a list of these;
- ``{"predictions", "answers", "rm_type"?, ...}``, both texts or both lists.

One response is answered by its verdict, a list by the list of verdicts, ``predictions`` by rewards, outcomes and
details. A reward that could not be found out is null with its outcome and cause, never 0. ``GET /health`` and
``GET /metrics`` are for operators.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from rollfeed.base.serving import PROMETHEUS_TYPE, decoded_body, prometheus_text
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import grader_name
from rollfeed.types import Outcome, Verdict
from rollfeed.types.fields import to_dict

_LARGE_BYTES = 1 << 16
"""Of a body that is decoded in a thread."""
_MOST_METADATA = 1 << 20
"""Characters of metadata that are JSON in a text."""
_OPTIONS = ("rm_type", "metadata", "reward_key", "prompt")
_Question: TypeAlias = dict[str, Any]
"""What the hub is asked: ``response``, ``label`` and options."""


class BadRequestError(Exception):
    """A request that cannot be understood; the text says why, ``status`` is the reply's."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RewardServer:
    """Answers requests with a hub, by the graders of ``rm_types`` and no other: some run programs.

    More than ``max_in_progress`` responses, graded or waiting, get status 429; a request larger than ``max_body_bytes``
    gets 413.
    """

    def __init__(
        self,
        hub: RewardHub,
        *,
        rm_types: Collection[str],
        max_in_progress: int = 1024,
        max_body_bytes: int = 64 * 1024**2,
    ) -> None:
        self._hub = hub
        self._rm_types = rm_types
        self._names = frozenset(map(grader_name, rm_types))
        self._max_in_progress = max_in_progress
        self._max_body_bytes = max_body_bytes
        self._num_in_progress = 0
        self._num_refused = 0
        self._num_bad = 0
        self._num_by_outcome = dict.fromkeys(Outcome, 0)
        self._seconds = 0.0

    def application(self) -> web.Application:
        application = web.Application(client_max_size=self._max_body_bytes)
        application.add_routes(
            [
                web.post("/", self._score),
                web.post("/get_reward", self._score),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        return application

    async def _score(self, request: web.Request) -> web.Response:
        try:
            body = await self._read(request)
            questions = _questions(body)
            self._check(questions)
        except BadRequestError as error:
            self._num_bad += 1
            return web.json_response({"error": str(error)}, status=error.status)
        if self._num_in_progress + len(questions) > self._max_in_progress:
            self._num_refused += 1
            message = f"{self._num_in_progress} of {self._max_in_progress} responses are in progress; try again later"
            return web.json_response({"error": message}, status=429, headers={"Retry-After": "1"})
        verdicts = await self._grade_all(questions)
        return web.json_response(_reply(body, verdicts))

    async def _read(self, request: web.Request) -> Any:
        try:
            return await decoded_body(await request.read(), large_bytes=_LARGE_BYTES)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        except web.HTTPRequestEntityTooLarge:
            raise BadRequestError(f"the body is larger than {self._max_body_bytes} bytes", status=413) from None

    def _check(self, questions: Sequence[_Question]) -> None:
        if len(questions) > self._max_in_progress:
            raise BadRequestError(f"{len(questions)} responses in a request; at most {self._max_in_progress} are taken")
        for number, question in enumerate(questions):
            metadata = question["metadata"] = _metadata(question.get("metadata"))
            problem = self._problem(metadata, question.get("rm_type")) if isinstance(metadata, Mapping) else None
            if problem is not None:
                raise BadRequestError(problem if len(questions) == 1 else f"response {number}: {problem}")

    def _problem(self, metadata: Mapping[str, Any], named: Any) -> str | None:
        rm_type = self._hub.grader_of(metadata, named)
        if rm_type is None and (self._hub.has_function or metadata.get("reward_fn") is not None):
            return None
        if (problem := self._hub.problem(rm_type)) is not None or grader_name(rm_type) in self._names:
            return problem
        started_for = ", ".join(sorted(self._rm_types)) or "no grader"
        return f"rm_type = {rm_type!r:.80}: this server was started for {started_for}: start it with --allow {rm_type}"

    async def _grade_all(self, questions: Sequence[_Question]) -> list[Verdict]:
        self._num_in_progress += len(questions)
        try:
            return list(await asyncio.gather(*map(self._grade, questions)))
        finally:
            self._num_in_progress -= len(questions)

    async def _grade(self, question: _Question) -> Verdict:
        started = time.monotonic()
        verdict = await self._hub.grade(**question)
        self._seconds += time.monotonic() - started
        self._num_by_outcome[verdict.outcome] += 1
        return verdict

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "in_progress": self._num_in_progress})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(self.families()), headers={"Content-Type": PROMETHEUS_TYPE})

    def families(self) -> Iterator[Metric]:
        """Return what is counted, for Prometheus."""
        verdicts = CounterMetricFamily("rollfeed_reward_verdicts", "Responses graded, by outcome.", labels=["outcome"])
        for outcome, count in self._num_by_outcome.items():
            verdicts.add_metric([outcome.value], count)
        yield verdicts
        yield GaugeMetricFamily(
            "rollfeed_reward_in_progress", "Responses being graded or waiting for it.", self._num_in_progress
        )
        yield CounterMetricFamily(
            "rollfeed_reward_refused_requests", "Requests refused because too much waits.", self._num_refused
        )
        yield CounterMetricFamily(
            "rollfeed_reward_bad_requests", "Requests that could not be understood.", self._num_bad
        )
        yield SummaryMetricFamily(
            "rollfeed_reward_grading_seconds",
            "Seconds from a response's arrival to its verdict.",
            count_value=sum(self._num_by_outcome.values()),
            sum_value=self._seconds,
        )


def _questions(body: Any) -> list[_Question]:
    if isinstance(body, list):
        if not body:
            raise BadRequestError("the body is an empty list; send at least one response")
        return [_question(one, f"entry {number}") for number, one in enumerate(body)]
    if not isinstance(body, dict):
        raise BadRequestError(f"the body is a {type(body).__name__}; send an object or a list of objects")
    if "predictions" not in body:
        return [_question(body, "the body")]
    predictions, answers = body["predictions"], body.get("answers")
    if isinstance(predictions, str):
        predictions, answers = [predictions], [answers]
    if not isinstance(predictions, list) or not isinstance(answers, list) or len(predictions) != len(answers):
        raise BadRequestError("predictions and answers must be both texts, or lists of the same length")
    if not predictions:
        raise BadRequestError("predictions is empty; send at least one")
    options = _options(body)
    return [{"response": one, "label": answer, **options} for one, answer in zip(predictions, answers, strict=True)]


def _question(one: Any, where: str) -> _Question:
    if not isinstance(one, dict):
        raise BadRequestError(f"{where} is a {type(one).__name__}; it must be an object with response and label")
    if "response" not in one:
        raise BadRequestError(f"{where} has no response; it has {', '.join(sorted(one)[:10]) or 'nothing'}")
    return {"response": one["response"], "label": one.get("label"), **_options(one)}


def _metadata(given: Any) -> Any:
    """Return metadata as an object; what is none, nor a text of one, as it came: the hub refuses it in the verdict."""
    if isinstance(given, str) and len(given) > _MOST_METADATA:
        raise BadRequestError(f"metadata is a text of more than {_MOST_METADATA} characters")
    read = given
    with suppress(ValueError, RecursionError):
        read = json.loads(given) if isinstance(given, str) else given
    if isinstance(read, str) and read is not given:  # the hub would read that, too, and not what is checked here
        raise BadRequestError("metadata is a text in a text; it must be a mapping")
    return {} if read is None else read


def _options(one: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: one[name] for name in _OPTIONS if one.get(name) is not None}
    if not isinstance(options.get("reward_key", ""), str):
        raise BadRequestError(f"reward_key is {options['reward_key']!r:.80}; it must be a text")
    return options


def _reply(body: Any, verdicts: Sequence[Verdict]) -> Any:
    if isinstance(body, list):
        return list(map(to_dict, verdicts))
    if "predictions" not in body:
        return to_dict(verdicts[0])
    columns: dict[str, list[Any]] = {
        "reward": [verdict.reward for verdict in verdicts],
        "outcome": [verdict.outcome.value for verdict in verdicts],
        "detail": [verdict.detail for verdict in verdicts],
    }
    return columns if isinstance(body["predictions"], list) else {name: each[0] for name, each in columns.items()}
