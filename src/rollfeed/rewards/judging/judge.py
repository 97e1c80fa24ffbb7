"""A judge: asks its model about responses, and makes verdicts of what it says.

Invariants: equal questions have one answer in a run, and are asked once at a time; what a response is worth does not
depend on the order in which questions are asked or answered; what has no readable verdict has no score.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from rollfeed.base.waiting import all_at_once
from rollfeed.config.api_key import ApiKey
from rollfeed.config.judge import JudgeMode, JudgeReply, JudgeSettings
from rollfeed.config.paths import expand_path
from rollfeed.errors import ConfigError
from rollfeed.rewards.judging.client import JudgeClient, JudgeFailedError
from rollfeed.rewards.judging.comparing import Comparisons, scores_of
from rollfeed.rewards.judging.counts import JudgeCounts, JudgeFailure
from rollfeed.rewards.judging.rubric import JudgeQuestion, Rubric
from rollfeed.rewards.judging.verdict_texts import (
    VERDICT_TOOL,
    JudgeCompletion,
    UnreadableVerdictError,
    read_ranking,
    read_score,
    verdict_tool,
)
from rollfeed.rewards.labels import NO_LABEL, LabelError, label_texts
from rollfeed.seeds import derive_seed
from rollfeed.types import Verdict

_MAX_DETAIL = 3_000
_TOP_LOGPROBS = 20


class _Heard(NamedTuple):
    """The verdict on what was asked."""

    score: float
    ranks: Sequence[int]
    """Of a list."""
    told: str
    """What it said, for people."""


@dataclass(slots=True)
class _Asking:
    """A question under way, for all that wait for its answer."""

    task: asyncio.Task[_Heard]
    num_waiting: int = 0


class Judge:
    """Scores responses as its settings say; as a grader one, by :meth:`compare` all responses to a prompt.

    A file with the rubric is looked for in ``folders``; ``counts`` is told of everything.

    Raises:
        ConfigError: If the rubric cannot be read or used, or the variable that should hold the key does not.
    """

    def __init__(
        self, settings: JudgeSettings, *, name: str, folders: Sequence[Path] = (), counts: JudgeCounts | None = None
    ) -> None:
        self.settings, self.name = settings, name
        self._counts = counts or JudgeCounts()
        key = f"{name}.rubric" if settings.rubric is not None else f"{name}.rubric_file"
        self._rubric = Rubric(settings.rubric or _read(settings.rubric_file, folders, key=key), settings, key=key)
        self._api_key = ApiKey.read(settings.api_key_env, setting=f"{name}.api_key_env")
        self._client = JudgeClient(settings, api_key=self._api_key, counts=self._counts)
        self._known: OrderedDict[bytes, _Heard] = OrderedDict()
        self._asking: dict[bytes, _Asking] = {}

    @property
    def judges(self) -> Sequence[Judge]:
        """This one alone."""
        return [self]

    @property
    def compares_group(self) -> bool:
        """Whether it needs all responses to a prompt: :meth:`compare`."""
        return self.settings.compares_group

    async def close(self) -> None:
        await self._client.close()

    def problem(self, label: Any, metadata: Mapping[str, Any]) -> str | None:
        """Fits :data:`rollfeed.rewards.labels.LabelProblem`."""
        try:
            if self.settings.compares_label:
                label_texts(label, metadata)
        except LabelError as error:
            return NO_LABEL if error.is_missing else str(error)
        found = self._rubric.problem(label, metadata)
        return None if found is None else NO_LABEL if found.is_missing else str(found)

    async def probe(self) -> None:
        """Ask the servers for one token in the form of the verdict.

        Raises:
            ConfigError: If they do not answer, or cannot give it.
        """
        body = self._body("Answer with one letter: A or B.")
        body |= {"max_tokens": 1} if "max_tokens" in body else {}
        try:
            reply = JudgeCompletion.read(await self._client.ask(body))
        except (JudgeFailedError, UnreadableVerdictError) as error:
            raise ConfigError(f"{self.name}: the judge does not answer: {self._told(error)}") from None
        if self.settings.verdict_form is JudgeReply.LETTER_LOGPROBS and not any(tops for _, tops in reply.tokens):
            raise ConfigError(
                f"{self.name}.reply = 'letter_logprobs': {self.settings.model} at {self.settings.servers[0]} has no "
                "top_logprobs: choose reply = 'letter', or a server that has them"
            )

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the verdict on one response; ERROR or TIMEOUT with the cause where there is none."""
        if self.compares_group:
            return (await self.compare([response], label, metadata))[0]
        try:
            if self.settings.compares_label:
                heard = await self._pair(response, label_texts(label, metadata)[0], label, metadata)
            else:
                heard = await self._ask(self._rubric.ask([response], label, metadata))
        except LabelError as error:
            return Verdict.failed(f"{self.name}: {error}")
        except JudgeFailedError as error:
            return self._failed(error)
        return Verdict(reward=heard.score, detail=heard.told)

    async def compare(self, responses: Sequence[str], label: Any, metadata: Mapping[str, Any]) -> list[Verdict]:
        """Return one verdict a response, in order; equal responses are one, and tie.

        A pair without a verdict fails its two responses, and of a fit or a ranking all.
        """
        unique = list(dict.fromkeys(responses))
        if len(responses) < 2:
            return [Verdict.failed(f"{self.name}: there is no other response to compare it with")] * len(responses)
        made = Comparisons(len(unique))
        try:
            if self.settings.mode is JudgeMode.LISTWISE:
                await self._rank(unique, label, metadata, made)
            else:
                await self._play(unique, label, metadata, made)
        except LabelError as error:
            return [Verdict.failed(f"{self.name}: {error}")] * len(responses)
        except JudgeFailedError as error:
            return [self._failed(error)] * len(responses)
        sizes = np.array([responses.count(each) for each in unique])
        scores = scores_of(made, sizes, self.settings.pair_scores)
        verdicts: dict[str, Verdict] = {}
        for at, response in enumerate(unique):
            failed, told = made.failures.get(at), "\n".join(made.told[at])[:_MAX_DETAIL]
            verdicts[response] = self._failed(failed) if failed else Verdict(reward=float(scores[at]), detail=told)
        return [verdicts[response] for response in responses]

    async def _play(self, unique: list[str], label: Any, metadata: Mapping[str, Any], made: Comparisons) -> None:
        """Compare each response with every other."""

        async def play(first: int, second: int) -> _Heard | JudgeFailedError:
            try:
                return await self._pair(unique[first], unique[second], label, metadata)
            except JudgeFailedError as error:
                return error

        pairs = list(combinations(range(len(unique)), 2))
        for (first, second), heard in zip(pairs, await all_at_once(play(*pair) for pair in pairs), strict=True):
            if isinstance(heard, _Heard):
                made.settle(first, second, heard.score, told=heard.told)
            elif self.settings.pair_scores.needs_all:
                raise heard
            else:
                made.failures[first] = made.failures[second] = heard

    async def _pair(self, first: str, second: str, label: Any, metadata: Mapping[str, Any]) -> _Heard:
        """Return the score of the first of two responses."""
        settings = self.settings
        if first == second:
            return _Heard(0.5, (), "they are equal")
        orders = sorted([(first, second), (second, first)])
        if not settings.swap_positions:
            orders = [_chance(settings, orders[0]).choice(orders)]
        heard = await all_at_once(self._ask(self._rubric.ask(order, label, metadata)) for order in orders)
        scores = [
            each.score if order[0] == first else 1.0 - each.score for each, order in zip(heard, orders, strict=True)
        ]
        score = sum(scores) / len(scores)
        if len(scores) == 2:
            agree = scores[0] == scores[1]
            if settings.verdict_form is JudgeReply.LETTER_LOGPROBS:
                agree = (scores[0] > 0.5) is (scores[1] > 0.5)
            elif not agree:
                score = 0.5
            self._counts.swap_agreements.append(agree)
        return _Heard(score, (), " | ".join(each.told for each in heard))

    async def _rank(self, unique: list[str], label: Any, metadata: Mapping[str, Any], made: Comparisons) -> None:
        """Have all responses ranked, in an order that chance chooses and in the reverse."""
        if len(unique) == 1:
            return
        order = sorted(range(len(unique)), key=unique.__getitem__)
        _chance(self.settings, [unique[at] for at in order]).shuffle(order)
        orders = [order, order[::-1]] if self.settings.swap_positions else [order]
        questions = (self._rubric.ask([unique[at] for at in each], label, metadata) for each in orders)
        heard = await all_at_once(self._ask(question, count=len(unique)) for question in questions)
        ranks = [dict(zip(each, said.ranks, strict=True)) for each, said in zip(orders, heard, strict=True)]
        for first, second in combinations(range(len(unique)), 2):
            scores = [0.5 + 0.5 * float(np.sign(each[second] - each[first])) for each in ranks]
            made.settle(first, second, sum(scores) / len(scores))
            if len(scores) == 2:
                self._counts.swap_agreements.append(scores[0] == scores[1])
        for told in made.told:
            told.append(" | ".join(each.told for each in heard))

    async def _ask(self, question: JudgeQuestion, *, count: int = 0) -> _Heard:
        """Return the answer to a question, which may be known or under way. Raises JudgeFailedError."""
        self._counts.num_cut += question.num_cut
        key = blake2b(question.text.encode("utf-8", "replace"), digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._counts.num_cache_hits += 1
            self._known.move_to_end(key)
            return known
        if (asking := self._asking.get(key)) is None:
            asking = self._asking[key] = _Asking(asyncio.create_task(self._ask_now(question.text, count)))
            asking.task.add_done_callback(lambda task: self._answered(key, task))
        else:
            self._counts.num_cache_hits += 1
        asking.num_waiting += 1
        try:
            return await asyncio.shield(asking.task)
        finally:
            asking.num_waiting -= 1
            if not asking.num_waiting and not asking.task.done():
                del self._asking[key]
                asking.task.cancel()

    def _answered(self, key: bytes, task: asyncio.Task[_Heard]) -> None:
        if (asking := self._asking.get(key)) is not None and asking.task is task:
            del self._asking[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._known[key] = task.result()
        if len(self._known) > self.settings.cache_size:
            self._known.popitem(last=False)

    async def _ask_now(self, text: str, count: int) -> _Heard:
        settings, counts = self.settings, self._counts
        try:
            try:
                reply = JudgeCompletion.read(await self._client.ask(self._body(text)))
            except UnreadableVerdictError as error:
                raise JudgeFailedError(JudgeFailure.UNREADABLE, str(error)) from None
            counts.prompt_tokens += reply.prompt_tokens
            counts.completion_tokens += reply.completion_tokens
            prices = settings.prompt_price * reply.prompt_tokens + settings.completion_price * reply.completion_tokens
            counts.cost += prices / 1e6
            told = f"{settings.model} ({reply.prompt_tokens} + {reply.completion_tokens} tokens): {reply.shown}"
            try:
                if settings.mode is JudgeMode.LISTWISE:
                    return _Heard(0.0, read_ranking(reply, settings, count=count), told)
                return _Heard(read_score(reply, settings), (), told)
            except UnreadableVerdictError as error:
                raise JudgeFailedError(JudgeFailure.UNREADABLE, f"no verdict, as {error}: {told}") from None
        except JudgeFailedError as error:
            counts.fail(error.kind)
            raise

    def _body(self, text: str) -> dict[str, Any]:
        settings = self.settings
        system = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": settings.temperature,
            "seed": settings.seed,
            "max_tokens": settings.max_tokens,
        }
        if settings.verdict_form is JudgeReply.LETTER_LOGPROBS:
            body |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        elif settings.verdict_form is JudgeReply.TOOL:
            choice = {"type": "function", "function": {"name": VERDICT_TOOL}}
            body |= {"tools": [verdict_tool(settings)], "tool_choice": choice}
        return settings.changed_body(body)

    def _failed(self, error: JudgeFailedError) -> Verdict:
        return Verdict.failed(f"{self.name}: {self._told(error)}", error.outcome)

    def _told(self, error: Exception) -> str:
        """Return what an error says, without the key: servers that answer 200 with an error may repeat it."""
        return self._api_key.hidden(str(error).encode("utf-8", "replace")).decode()


def _chance(settings: JudgeSettings, responses: Sequence[str]) -> Random:
    """Return what chooses an order: the same for the same responses, wherever they stand in their group."""
    return Random(derive_seed(settings.seed, "judge order", *responses))


def _read(path: str | None, folders: Sequence[Path], *, key: str) -> str:
    assert path is not None, "either the rubric is there, or its file"
    wanted = Path(expand_path(path))
    found = next((folder / wanted for folder in folders if (folder / wanted).exists()), wanted)
    try:
        return found.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = {path!r}: cannot be read ({error}); name a text file") from None
