"""Has a model say again how likely the tokens of some samples are."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from rollfeed.app.model import Model, build_engine
from rollfeed.config import EngineSettings, SamplingSettings, Settings
from rollfeed.errors import ConfigError, EngineError
from rollfeed.lint import Marks, OtherModelError, Report, Rescored, Subject, compare
from rollfeed.lint.turns import Turns
from rollfeed.protocols import Engine, Tokenizer

_MOST_SCORED, _MOST_SECONDS, _AT_A_TIME = 256, 20.0, 8
_TOLERANCE = {"fp32": 0.01, "int8": 0.05}
_OTHER_TOLERANCE = 0.1
"""Nats a token; what differs by ten times as much as the median token is allowed, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPolicy:
    """Names what sampled, as far as it is here."""

    settings: Settings | None = None
    """Of its run."""
    model: Model | None = None
    is_given: bool = False
    """Whether the model is not the run's own."""
    reason: str | None = "give --model"
    """Why logprobs are not computed again."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's."""
        return None if self.model is None else self.model.tokenizer

    @property
    def sampling(self) -> SamplingSettings:
        """As the run's settings say; as by default where they are not known."""
        return SamplingSettings() if self.settings is None else self.settings.sampling

    def with_model(self, model: Model) -> SampledPolicy:
        """Return the same with other weights."""
        return replace(self, model=model, is_given=True, reason=None)

    def engine(self, context_length: int) -> Engine:
        """Return what computes as the run did, where it was the run's."""
        assert self.model is not None
        if self.settings is None or self.is_given:
            return build_engine(self.model, EngineSettings(context_length=context_length))
        return build_engine(self.model, self.settings.engine, deterministic=self.settings.rollout.deterministic)


class Chosen:
    """A few samples, each as likely as the others; the draws are always the same."""

    def __init__(self) -> None:
        self.some: list[tuple[Subject, Turns]] = []
        self.num_seen = 0
        self.num_with_pictures = 0
        self._random = Random(0)

    def add(self, subject: Subject, turns: Turns) -> None:
        """Take a sample, or leave it, where version 0 has sampled some of it."""
        if subject.spans is not None and all(version != 0 for _, _, version in subject.spans):
            return
        if subject.prompt is not None and subject.prompt.images:
            self.num_with_pictures += 1  # texts are scored without any
            return
        self.num_seen += 1
        if len(self.some) < _MOST_SCORED:
            self.some.append((subject, turns))
        elif (place := self._random.randrange(self.num_seen)) < _MOST_SCORED:
            self.some[place] = (subject, turns)


async def rescore(report: Report, chosen: Chosen, policy: SampledPolicy, marks: Marks | None) -> None:
    """Compare what was chosen with what the model says, for as long as that may take; report what was not compared."""
    what, sampling, scored = "logprobs against the model", policy.sampling, list[Rescored]()
    if chosen.num_with_pictures:
        report.unchecked[f"{what}: answers to pictures"] += chosen.num_with_pictures
    if not chosen.some:
        return
    try:
        if policy.reason is None and sampling.repetition_penalty != 1.0:
            raise ConfigError("there is a repetition penalty")
        if policy.reason is not None:
            raise ConfigError(policy.reason)
        longest = max(len(subject.tokens) for subject, _ in chosen.some)
        precision = await _score(chosen, policy.engine(longest + 1), sampling.rollout_temperature, scored)
        for found in compare(
            scored,
            tolerance=_TOLERANCE.get(precision, _OTHER_TOLERANCE),
            is_restricted=sampling.rollout_top_p < 1.0 or sampling.rollout_top_k != -1 or sampling.min_new_tokens > 0,
            marks=marks,
        ):
            report.add(found)
    except (EngineError, OtherModelError, ConfigError) as error:
        report.unchecked[f"{what}: {error}"] += chosen.num_seen
    else:
        if len(scored) < chosen.num_seen:
            report.unchecked[f"{what}: a part has been compared"] += chosen.num_seen - len(scored)


async def _score(chosen: Chosen, engine: Engine, temperature: float, scored: list[Rescored]) -> str:
    """Add what an engine says of the samples; return its precision."""
    # Imported here because it brings torch, which is not needed where nothing is computed again.
    from rollfeed.engine.local import EmbeddedEngine

    assert isinstance(engine, EmbeddedEngine)
    started = time.monotonic()
    async with engine:
        for first in range(0, len(chosen.some), _AT_A_TIME):
            some = chosen.some[first : first + _AT_A_TIME]
            logprobs_N = await engine.score_tempered([subject.tokens for subject, _ in some], temperature)
            ends = np.cumsum([len(subject.tokens) - 1 for subject, _ in some])
            for (subject, turns), whole in zip(some, np.split(logprobs_N, ends[:-1]), strict=True):
                scored.append(_rescored(subject, turns, whole))
            if time.monotonic() - started > _MOST_SECONDS:
                break
    return engine.precision


def _rescored(subject: Subject, turns: Turns, whole: NDArray[np.float64]) -> Rescored:
    logprobs = np.concatenate([[np.nan], whole])[len(whole) + 1 - subject.response_length :]
    known = turns.sampled.copy()
    for start, end, version in subject.spans or ():
        if version != 0:
            known[start:end] = False
    return Rescored(subject, logprobs, known)
