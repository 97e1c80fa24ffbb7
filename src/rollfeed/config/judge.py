"""``[reward.judge]`` and ``[reward.judges.NAME]``: models that score answers by a rubric."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from rollfeed.config.api_key import KeyVariable
from rollfeed.config.paths import checked_address
from rollfeed.config.section import Free, Section


class JudgeMode(StrEnum):
    """The number of answers that a judge sees at once."""

    SINGLE = "single"
    PAIRWISE = "pairwise"
    LISTWISE = "listwise"


class JudgeReply(StrEnum):
    """The form in which a judge gives its verdict."""

    NUMBER = "number"
    LETTER = "letter"
    LETTER_LOGPROBS = "letter_logprobs"
    TOOL = "tool"


class Opponent(StrEnum):
    """The answer that another is compared with."""

    GROUP = "group"
    LABEL = "label"


class PairScores(StrEnum):
    """Ways in which comparisons become rewards."""

    WIN_RATE = "win_rate"
    BRADLEY_TERRY = "bradley_terry"

    @property
    def needs_all(self) -> bool:
        """Whether the reward of an answer depends on comparisons that it has no part in."""
        return self is PairScores.BRADLEY_TERRY


class Combine(StrEnum):
    """Ways in which the scores of a panel become one."""

    MEAN = "mean"
    MEDIAN = "median"
    MIN = "min"


PAIR_CHOICES = {"A": 1.0, "B": 0.0, "C": 0.5}
"""Verdicts on a pair: the first is better, the second, neither; each with the score of the first."""


class JudgeSettings(Section):
    """A model behind an OpenAI-style chat endpoint that scores answers by a rubric, for `rm_type = "judge"`.

    See docs/judges.md.
    """

    servers: Free[tuple[Annotated[str, AfterValidator(partial(checked_address, has_path=True))], ...]] = Field(
        default=(), strict=False
    )
    """Base URLs of servers of the same model, such as `["http://10.0.0.5:8000/v1"]`; `/chat/completions` is added."""
    api_key_env: Free[KeyVariable | None] = None
    """Name of the environment variable that holds the key of the servers. The key itself is stored nowhere."""
    model: str = ""
    """Its name on the servers."""
    system_prompt: str | None = None
    """A system message before the rubric."""
    rubric: str | None = None
    """What the judge is asked: a text with `{prompt}`, `{response}`, `{label}`, `{metadata.NAME}` and `{fence}`; of a
    pair `{response_a}` and `{response_b}`, of a list `{responses}`.
    """
    rubric_file: str | None = None
    """A text file with the rubric, instead."""
    instruction: str | None = None
    """The end of the question, which asks for the form of the verdict; by default what `reply` needs, and nothing where
    this is empty.
    """
    mode: JudgeMode = Field(default=JudgeMode.SINGLE, strict=False)
    """Whether it sees one answer, compares pairs, or ranks all answers to a prompt."""
    reply: JudgeReply | None = Field(default=None, strict=False)
    """How it gives its verdict: `number`, which one answer has by default; `letter`, the default of pairs;
    `letter_logprobs`, the letters' scores weighted by their probabilities; `tool`, a call with a schema.
    """
    score_range: tuple[float, float] = Field(default=(0.0, 10.0), strict=False)
    """Least and greatest number; others are unreadable. The number is the reward."""
    choices: dict[str, float] = Field(default={})
    """Letters, or short words, and their scores, as `{A = 1.0, B = 0.0}`; with `tool`, instead of a number."""
    opponent: Opponent = Field(default=Opponent.GROUP, strict=False)
    """Of pairs: every other answer of the group, or the label."""
    pair_scores: PairScores = Field(default=PairScores.WIN_RATE, strict=False)
    """Of pairs in a group: the share of comparisons that were won, or what the Bradley-Terry model that fits them best
    expects it to be.
    """
    swap_positions: bool = True
    """Ask a second time with the positions exchanged (of a list, in reversed order). A pair whose verdicts differ is a
    tie; of a list, and of probabilities, the mean counts.
    """
    panel: tuple[str, ...] = Field(default=(), strict=False)
    """Names of `[reward.judges]` that judge together, instead of one of its own."""
    combine: Combine = Field(default=Combine.MEAN, strict=False)
    """The score of a panel."""
    sees_reasoning: bool = False
    """Show the judge what stands before `</think>`, too."""
    max_response_chars: int = Field(default=20_000, ge=100, le=10_000_000)
    """Longer responses are cut in the middle, and say so."""
    max_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """Of the reply, thoughts included; a verdict that is cut off is unreadable."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0, strict=False)
    """Of the judge's sampling."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Sent with every question; of lists, also of their orders."""
    extra_body: dict[str, JsonValue] = Field(default={})
    """Further entries of the request's body, as `{reasoning_effort = "low"}`; an empty table leaves an entry out."""
    cache_size: Free[int] = Field(default=20_000, ge=0, le=10_000_000)
    """Verdicts that are kept for equal questions of the run."""
    timeout_seconds: Free[float] = Field(default=60.0, gt=0.0, le=86_400.0, strict=False)
    """For one try."""
    patience_seconds: Free[float] = Field(default=600.0, gt=0.0, le=604_800.0, strict=False)
    """For one question: its turn, all tries, and the pauses that servers ask for."""
    max_tries: Free[int] = Field(default=4, ge=1, le=100)
    """When connections fail, time runs out, or the status is 408 or 5xx; 429 is tried again until patience ends."""
    max_concurrency: Free[int] = Field(default=1024, ge=1, le=100_000)
    """Most requests at once at all servers; the best number below it is searched for, and 429 lowers it."""
    requests_per_minute: Free[int | None] = Field(default=None, ge=1, le=10_000_000)
    """Most requests in any minute, tries included; by default any number."""
    prompt_price: Free[float] = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """Dollars per million prompt tokens, for metric `judge/cost`."""
    completion_price: Free[float] = Field(default=0.0, ge=0.0, le=1e6, strict=False)
    """Dollars per million tokens of replies."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for problem in self._panel_problems() if self.panel else self._problems():
            raise ValueError(problem)
        return self

    def _panel_problems(self) -> Iterator[str]:
        if own := sorted(self.changed_values().keys() - {"panel", "combine"}):
            yield f"{own[0]} has no effect with a panel, whose judges have their own: remove it"
        if len(set(self.panel)) < max(2, len(self.panel)):
            yield f"panel = {list(self.panel)}: name at least two judges of [reward.judges], each once"

    def _problems(self) -> Iterator[str]:
        for name in ("servers", "model"):
            if not getattr(self, name):
                yield f"{name} is required; add it"
        if (self.rubric is None) is (self.rubric_file is None):
            yield "a judge needs a rubric: set either rubric or rubric_file"
        low, high = self.score_range
        if not low < high:
            yield f"score_range = {[low, high]}: the first must be below the second"
        if self.mode is not JudgeMode.SINGLE:
            yield from self._problems_of_several()
        elif self.reply in (JudgeReply.LETTER, JudgeReply.LETTER_LOGPROBS) and len(self.choices) < 2:
            yield f"reply = {self.reply.value!r} needs choices: name at least two, with their scores"
        elif self.choices and self.verdict_form is JudgeReply.NUMBER:
            yield "choices have no effect with reply = 'number': set reply = 'letter', 'letter_logprobs' or 'tool'"
        if self.reply is JudgeReply.LETTER_LOGPROBS and len(self.choices) > 20:
            yield "choices: servers give the log-probabilities of 20 tokens at most"
        folded = [choice.strip().casefold() for choice in self.choices]
        if not all(folded) or len(set(folded)) < len(folded):
            yield f"choices = {list(self.choices)}: they must differ by more than case and blanks"

    def _problems_of_several(self) -> Iterator[str]:
        if self.choices:
            yield f"choices have no effect with mode = {self.mode.value!r}: remove them"
        if self.mode is JudgeMode.LISTWISE and self.reply is not None:
            yield "reply has no effect with mode = 'listwise', whose verdict is a ranking: remove it"
        if self.mode is JudgeMode.PAIRWISE and self.reply is JudgeReply.NUMBER:
            yield "reply = 'number': a comparison is a letter: set 'letter', 'letter_logprobs' or 'tool'"

    @property
    def verdict_form(self) -> JudgeReply:
        """The form of the verdict on one answer or a pair."""
        return self.reply or (JudgeReply.NUMBER if self.mode is JudgeMode.SINGLE else JudgeReply.LETTER)

    @property
    def scores(self) -> dict[str, float]:
        """The letters and their scores; empty where the verdict is a number or a ranking."""
        return PAIR_CHOICES if self.mode is JudgeMode.PAIRWISE else self.choices

    @property
    def compares_label(self) -> bool:
        """Whether an answer is compared with the label."""
        return self.mode is JudgeMode.PAIRWISE and self.opponent is Opponent.LABEL

    @property
    def compares_group(self) -> bool:
        """Whether an answer's score depends on the other answers to its prompt."""
        return self.mode is not JudgeMode.SINGLE and not self.compares_label

    def changed_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request's body with :attr:`extra_body`."""
        return {name: value for name, value in {**body, **self.extra_body}.items() if value != {}}
