"""Counts of what judges were asked and what that cost."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

import numpy as np


class JudgeFailure(StrEnum):
    """Kinds of failed questions."""

    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    CONNECTION = "connection"
    HTTP = "http"
    UNREADABLE = "unreadable"


@dataclass(slots=True)
class JudgeCounts:
    """All judges of a run together, since :meth:`taken` was called last."""

    num_retries: int = 0
    num_cache_hits: int = 0
    num_cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Of the requests that were answered."""
    failures: dict[JudgeFailure, int] = field(default_factory=dict)
    panel_agreements: list[bool] = field(default_factory=list)
    swap_agreements: list[bool] = field(default_factory=list)

    @property
    def has_asked(self) -> bool:
        """Whether a judge was asked."""
        return bool(self.seconds or self.failures or self.num_cache_hits)

    def fail(self, kind: JudgeFailure, *, count: int = 1) -> None:
        """Count questions without a verdict."""
        self.failures[kind] = self.failures.get(kind, 0) + count

    def add(self, other: JudgeCounts) -> None:
        """Count what was counted elsewhere, too."""
        for kind, count in other.failures.items():
            self.fail(kind, count=count)
        for each in fields(self):
            if each.name != "failures":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def taken(self) -> JudgeCounts:
        """Return what was counted, and begin again."""
        found, none = JudgeCounts(), JudgeCounts()
        for each in fields(self):
            setattr(found, each.name, getattr(self, each.name))
            setattr(self, each.name, getattr(none, each.name))
        return found

    def take(self) -> dict[str, float]:
        """Return the metrics of a step, and begin again; none where no judge was asked."""
        return self.taken().metrics() if self.has_asked else {}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of what was asked."""
        metrics = {
            #: judge/calls: requests that judges answered in the step; as all of these, they differ from run to run
            "judge/calls": float(len(self.seconds)),
            #: judge/retries: requests that were sent again
            "judge/retries": float(self.num_retries),
            #: judge/cache_hits: questions that were answered before, or were under way
            "judge/cache_hits": float(self.num_cache_hits),
            #: judge/cut_responses: responses that were too long to be shown whole
            "judge/cut_responses": float(self.num_cut),
            #: judge/prompt_tokens, judge/completion_tokens: tokens as the servers count them
            "judge/prompt_tokens": float(self.prompt_tokens),
            "judge/completion_tokens": float(self.completion_tokens),
            #: judge/cost: dollars, by the prices in the settings
            "judge/cost": self.cost,
            #: judge/error_<kind>: questions without a verdict: timeout, rate_limited, connection, http or unreadable
            **{f"judge/error_{kind.value}": float(self.failures.get(kind, 0)) for kind in JudgeFailure},
        }
        if self.seconds:
            #: judge/seconds_p50, judge/seconds_p99: seconds from a request to its answer
            metrics["judge/seconds_p50"] = float(np.percentile(self.seconds, 50))
            metrics["judge/seconds_p99"] = float(np.percentile(self.seconds, 99))
        if self.panel_agreements:
            #: judge/panel_agreement: share of pairs of a panel's judges that give a response the same score
            metrics["judge/panel_agreement"] = float(np.mean(self.panel_agreements))
        if self.swap_agreements:
            #: judge/swap_agreement: share of pairs of responses about which a judge says the same in both positions
            metrics["judge/swap_agreement"] = float(np.mean(self.swap_agreements))
        return metrics
