"""Verdicts read out of what a judge replied.

Invariant: a score is one that the judge gave, whole and within what it may be; anything else is an
:class:`UnreadableVerdictError`, never a guess.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollfeed.answers import after_reasoning
from rollfeed.config.judge import JudgeReply, JudgeSettings
from rollfeed.types.text import text_of

VERDICT_TOOL = "verdict"
"""The function that a judge calls with its verdict."""
_BROKEN_OFF = ("abort", "content_filter", "error")
"""Reasons for which servers end a reply in its middle."""
_MAX_SHOWN = 1_000
_LEAST_MASS = 0.5
"""Probability that the letters must have together."""
_WRAPPING = " \t\n*_`\"'()[]{}<>.:!#"
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_NOT_FURTHER = r"(?![\w^%]|\.\d|,\d|\s*[-\u2013]\s*\d|\s+to\s+\d)"
_GRADE = rf"({_NUMBER}){_NOT_FURTHER}(?:\s*(?:/|out of)\s*({_NUMBER}))?"
_CALLED = r"\bscore\b(?:\s*\([^)\n]*\))?[\s*_`\"']*(?:is\b|of\b|[:=])?[\s*_`\"'\[(]*"
_SCORE = re.compile(rf"(?i:{_CALLED})(?:{_GRADE}|(?=[-+.\u2013]?\s*\d))")
"""Matches a number that cannot be read, too, without a group."""
_ALONE = re.compile(rf"(?<![\w.^/\u2013-]){_GRADE}")
_MINUS = "\u2212"
_RANKING = re.compile(r"\branking\b[\s*_`\"']*[:=]?[\s*_`\"']*([\d\s>=\[\]]+)", re.IGNORECASE)
_OTHER_PHRASE = r"[ \t]+(?!(?:is|wins|it|this|that|the|there|because|since|as|for)\b)\w"
"""Goes on behind a choice so that it may be a word of something else: "A good answer", "No idea"."""
_CLAIM = r"(?:verdict|answer|choice|winner|decision)\b[\s*_`\"']*(?:is\b|[:=])[\s*_`\"'\[(]*"


class UnreadableVerdictError(Exception):
    """A reply has no verdict in it; the text says why."""


@dataclass(frozen=True, slots=True)
class JudgeCompletion:
    """The parts of a chat completion that matter here."""

    content: str
    finish_reason: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments of the functions it calls."""
    tokens: tuple[tuple[str, Mapping[str, float]], ...]
    """Each with the log-probabilities of the tokens that could have stood there; empty where none were sent."""
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def read(cls, body: Any) -> JudgeCompletion:
        """Return the first choice of a body. Raises UnreadableVerdictError if there is none."""
        try:
            choice, usage = body["choices"][0], body.get("usage") or {}
            message = choice["message"]
            calls = [each["function"] for each in message.get("tool_calls") or ()]
            entries = (choice.get("logprobs") or {}).get("content") or ()
            return cls(
                content=text_of(message.get("content")),
                finish_reason=str(choice.get("finish_reason")),
                calls=tuple((str(call["name"]), str(call["arguments"])) for call in calls),
                tokens=tuple((str(each["token"]), _tops(each)) for each in entries),
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            shown = json.dumps(body, default=str)[:200]
            raise UnreadableVerdictError(f"the reply is no chat completion ({error!r:.80}): {shown}") from None

    @property
    def shown(self) -> str:
        """The text that is kept of it."""
        text = self.calls[0][1] if self.calls and not self.content.strip() else self.content.strip()
        return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]} [...] {text[-_MAX_SHOWN // 2 :]}"


def _tops(entry: Mapping[str, Any]) -> dict[str, float]:
    return {str(top["token"]): float(top["logprob"]) for top in entry.get("top_logprobs") or ()}


def read_score(reply: JudgeCompletion, settings: JudgeSettings) -> float:
    """Return the score that a reply gives to one response, or to the first of a pair.

    Raises:
        UnreadableVerdictError: If it gives none.
    """
    form = settings.verdict_form
    if form is JudgeReply.LETTER_LOGPROBS:
        return _weighted(reply, settings.scores)
    _check_end(reply, settings)
    if form is JudgeReply.TOOL:
        return _of_call(reply, settings)
    text = after_reasoning(reply.content).strip()
    if form is JudgeReply.NUMBER:
        return _number(text, settings.score_range)
    return settings.scores[_letter(text, list(settings.scores))]


def read_ranking(reply: JudgeCompletion, settings: JudgeSettings, *, count: int) -> Sequence[int]:
    """Return the rank of each of ``count`` responses as they were shown, 0 for the best; equals share one.

    Raises:
        UnreadableVerdictError: If the reply does not rank each of them once.
    """
    _check_end(reply, settings)
    found = _RANKING.findall(after_reasoning(reply.content))
    ranks: dict[int, int] = {}
    places = found[-1].replace("[", "").replace("]", "").split(">") if found else []
    for rank, place in enumerate(places):
        for number in place.split("="):
            if not number.strip().isdecimal() or int(number) in ranks:
                raise UnreadableVerdictError(f"its ranking {found[-1].strip()!r:.80} cannot be read")
            ranks[int(number)] = rank
    if sorted(ranks) != list(range(1, count + 1)):
        raise UnreadableVerdictError(f"it ranks {sorted(ranks)}, and not each of {count} responses once")
    return [ranks[number] for number in range(1, count + 1)]


def verdict_tool(settings: JudgeSettings) -> dict[str, Any]:
    """Return the function that a judge is to call."""
    low, high = settings.score_range
    score: dict[str, Any] = {"type": "number", "minimum": low, "maximum": high}
    if settings.scores:
        score = {"type": "string", "enum": list(settings.scores)}
    properties = {"reason": {"type": "string", "description": "Why, in a sentence."}, "score": score}
    schema = {"type": "object", "properties": properties, "required": ["score"], "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": VERDICT_TOOL, "description": "Your verdict.", "parameters": schema},
    }


def _check_end(reply: JudgeCompletion, settings: JudgeSettings) -> None:
    if reply.finish_reason == "length":
        raise UnreadableVerdictError(f"it was cut off at max_tokens = {settings.max_tokens}")
    if reply.finish_reason in _BROKEN_OFF:
        raise UnreadableVerdictError(f"it was broken off: finish_reason = {reply.finish_reason!r}")


def _number(text: str, score_range: tuple[float, float]) -> float:
    """Return the last number that is called the score, else the only number of the text."""
    low, high = score_range
    text = text.replace(_MINUS, "-")
    found = next(reversed(list(_SCORE.finditer(text))), None) or _ALONE.search(text)
    is_only = found is not None and not re.search(r"\d", text[: found.start()] + text[found.end() :])
    if found is None or found[1] is None or not (found.re is _SCORE or is_only):
        raise UnreadableVerdictError("it has no number that is called the score, or is the only one")
    number, most = found.groups()
    if most and float(most) != high:
        raise UnreadableVerdictError(f"its score {number} is out of {most}, and not of {high:g}")
    return _within(float(number), low, high)


def _within(score: float, low: float, high: float) -> float:
    if not (math.isfinite(score) and low <= score <= high):
        raise UnreadableVerdictError(f"its score {score:g} is not from {low:g} to {high:g}")
    return score


def _letter(text: str, choices: Sequence[str]) -> str:
    """Return the choice that is all, else the last that is marked as the verdict, else the only one if it is first."""
    by_folded = {choice.casefold(): choice for choice in choices}
    if (whole := by_folded.get(text.strip(_WRAPPING).casefold())) is not None:
        return whole
    # Single letters as they are written only: "a" is a word in most texts.
    longest_first = sorted(choices, key=len, reverse=True)
    either = "|".join(f"(?i:{re.escape(each)})" if len(each) > 1 else re.escape(each) for each in longest_first)
    if marked := re.findall(rf"\[\[\s*({either})\s*\]\]|\b(?i:{_CLAIM})({either})(?!\w)", text):
        return by_folded[(marked[-1][0] or marked[-1][1]).casefold()]
    alone = {each.casefold() for each in re.findall(rf"(?<!\w)({either})(?!\w)", text)}
    if len(alone) == 1 and re.match(rf"({either})(?!\w|{_OTHER_PHRASE})", text.lstrip(_WRAPPING)):
        return by_folded[alone.pop()]
    raise UnreadableVerdictError(f"it is none of {', '.join(choices)}")


def _weighted(reply: JudgeCompletion, scores: Mapping[str, float]) -> float:
    """Return the mean of the scores by the probabilities that the first token of the verdict had."""
    if not reply.tokens:
        raise UnreadableVerdictError("it has no logprobs")
    last_thought = max((at for at, (token, _) in enumerate(reply.tokens) if "</think>" in token), default=-1)
    for token, tops in reply.tokens[last_thought + 1 :]:
        if not token.strip(_WRAPPING):
            continue
        if not tops:
            raise UnreadableVerdictError("it has no top_logprobs")
        by_folded = {choice.casefold(): score for choice, score in scores.items()}
        masses = [
            (math.exp(logprob), by_folded[folded])
            for each, logprob in tops.items()
            if (folded := each.strip(_WRAPPING).casefold()) in by_folded
        ]
        total = math.fsum(mass for mass, _ in masses)
        if not total >= _LEAST_MASS:
            raise UnreadableVerdictError(
                f"{', '.join(scores)} have {total:.2f} of the probability, with {token!r:.40} first"
            )
        return math.fsum(mass * score for mass, score in masses) / total
    raise UnreadableVerdictError("it has no token after its thoughts")


def _of_call(reply: JudgeCompletion, settings: JudgeSettings) -> float:
    arguments = next((arguments for name, arguments in reply.calls if name == VERDICT_TOOL), None)
    if arguments is None:
        raise UnreadableVerdictError(f"it does not call {VERDICT_TOOL}")
    try:
        score = json.loads(arguments)["score"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise UnreadableVerdictError(f"its arguments have no score: {arguments:.80}") from None
    if settings.scores:
        if not isinstance(score, str) or score not in settings.scores:
            raise UnreadableVerdictError(f"its score {score!r:.80} is none of {', '.join(settings.scores)}")
        return settings.scores[score]
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise UnreadableVerdictError(f"its score {score!r:.80} is no number")
    return _within(float(score), *settings.score_range)
