"""The faults that samples may have, and what is to be done about each."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

MOST_FINDINGS = 1000
"""That a report holds whole; the others are counted."""


class Flaw(StrEnum):
    """The ways in which a sample is not what was sampled."""

    SHAPE = "shape"
    WEIGHT = "weight"
    PROMPT_TOKENS = "prompt_tokens"
    DOUBLED_BOS = "doubled_bos"
    PROMPT_TRAINED = "prompt_trained"
    TOOL_TOKEN_TRAINED = "tool_token_trained"
    SHIFTED_MASK = "shifted_mask"
    MISSING_END_OF_TURN = "missing_end_of_turn"
    TEMPLATE_BREAK = "template_break"
    RETOKENISED_TURN = "retokenised_turn"
    LOGPROB_OF_ANOTHER_TOKEN = "logprob_of_another_token"
    IMPOSSIBLE_LOGPROB = "impossible_logprob"
    TRUNCATED_MARKED_COMPLETE = "truncated_marked_complete"
    UNFINISHED_TRAINED = "unfinished_trained"
    FORK_TRAINED_TWICE = "fork_trained_twice"
    VERSION_GAP = "version_gap"


ADVICE = {
    Flaw.SHAPE: "append ids, weights, logprobs and versions together, one of each a token",
    Flaw.WEIGHT: "give each token a weight from 0 to 1",
    Flaw.PROMPT_TOKENS: "let a sample begin with the ids that were sent, tokenised once",
    Flaw.DOUBLED_BOS: "encode rendered chat text without adding special tokens",
    Flaw.PROMPT_TRAINED: "begin the response behind the prompt, or give the prompt weight 0",
    Flaw.TOOL_TOKEN_TRAINED: "give weight 0 to everything that the policy did not sample",
    Flaw.SHIFTED_MASK: "align the mask with the response: its first weight is that of the response's first token",
    Flaw.MISSING_END_OF_TURN: "keep the sampled token that ends a turn, with its weight",
    Flaw.TEMPLATE_BREAK: "tokenise what is told between two turns as one suffix of the template's full render",
    Flaw.RETOKENISED_TURN: "keep the ids that were sampled: text that is tokenised again may have others",
    Flaw.LOGPROB_OF_ANOTHER_TOKEN: "store each token's own logprob, and 0.0 where nothing was sampled",
    Flaw.IMPOSSIBLE_LOGPROB: "store natural logarithms of probabilities: finite, at most 0",
    Flaw.TRUNCATED_MARKED_COMPLETE: "mark what a length limit ended as truncated",
    Flaw.UNFINISHED_TRAINED: "resume or drop what was aborted or failed",
    Flaw.FORK_TRAINED_TWICE: "give a turn that several samples of a rollout share its weight in one of them",
    Flaw.VERSION_GAP: "say of every response token which policy version sampled it; versions never go down",
}


class SamplePlace(NamedTuple):
    """One sample; what a format does not say of it is None."""

    source: str
    """The step, or the file and line."""
    group: int | str | None = None
    rollout: int | str | None = None
    sample: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a sample."""

    kind: Flaw
    place: SamplePlace
    start: int
    end: int
    """The tokens that are meant, of prompt and response together: from ``start`` to before ``end``."""
    detail: str
    text: str = ""
    """Those tokens and a few around, as text; as ids where there is no tokenizer."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values, with what is to be done."""
        about = {name: value for name, value in asdict(self).items() if name != "place"}
        return {**about, **self.place._asdict(), "advice": ADVICE[self.kind]}


@dataclass(slots=True)
class Report:
    """All that has been found, and how much was looked at."""

    num_samples: int = 0
    num_tokens: int = 0
    by_kind: Counter[Flaw] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    """The first :data:`MOST_FINDINGS`."""
    unchecked: Counter[str] = field(default_factory=Counter)
    """What could not be checked and why, with the number of samples."""

    def add(self, finding: Finding) -> None:
        self.by_kind[finding.kind] += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "samples": self.num_samples,
            "tokens": self.num_tokens,
            "by_kind": {kind.value: count for kind, count in sorted(self.by_kind.items())},
            "findings": [finding.to_dict() for finding in self.findings],
            "unchecked": dict(self.unchecked),
        }
