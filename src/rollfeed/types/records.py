"""The records that move through rollfeed.

A *prompt* is answered ``n_samples_per_prompt`` times; one answering is a *rollout*; it yields one
or more *samples* (more than one when an agent forks); the rollouts of one prompt are a *group*.

Axes: P prompt tokens, R response tokens, S samples of a batch, G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import RewardError
from rollfeed.types.engine import RoutedExperts, SamplingMask, VersionSpan, check_spans
from rollfeed.types.fields import Int32, VaryingInt32, from_dict, names_of, to_dict
from rollfeed.types.pictures import Picture
from rollfeed.types.verdict import Correct, Outcome, Reward, Verdict, mean_number, mean_reward

Message: TypeAlias = Mapping[str, Any]
"""One chat message: at least ``role`` and ``content``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, rendered and tokenised once for its whole group."""

    prompt_id: str
    """Names the prompt within the run: source, row or task, and epoch. Stable over restarts."""
    source: str
    """Where the prompt comes from."""
    text: str
    """What was tokenised: the rendered chat template, or the raw text."""
    token_ids: NDArray[np.int32]
    """The text's tokens. ``(P,)``."""
    messages: tuple[Message, ...] | None = None
    """The chat messages; None for raw text."""
    label: Any = None
    """What a grader compares with."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else the prompt says; ``rm_type`` chooses its grader."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Descriptions of tools; None without any."""
    images: tuple[Picture, ...] = ()
    """Pictures, in the order of their places among the tokens, which have room for each."""


class SampleStatus(StrEnum):
    """The state that a sample is in."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable token sequence: P prompt tokens, then R response tokens.

    Raises:
        ValueError: If mask, logprobs or spans do not fit R, or R does not fit the tokens.
    """

    token_ids: NDArray[np.int32]
    """Prompt and response together. ``(P + R,)``."""
    response_length: Int32
    """R."""
    loss_mask: NDArray[np.float32]
    """Weight of each response token in the loss; 0 where it was inserted, not sampled. ``(R,)``."""
    logprobs: NDArray[np.float32]
    """Natural-log probability of each response token in the distribution that it was sampled from; 0.0 where it was
    inserted. ``(R,)``."""
    version_spans: tuple[VersionSpan, ...]
    """Which policy version made the response tokens from ``start`` to ``end`` (exclusive); they cover the response.
    Inserted tokens carry the version of their turn."""
    status: SampleStatus
    """Where the sample stands."""
    group_index: int
    """One per prompt drawn."""
    index: int
    """One per sample."""
    rollout_id: int
    """One per execution of a prompt; the samples of forks share it."""
    response: str = ""
    """The response's text."""
    label: Any = None
    """What a grader compares with, as the prompt says."""
    reward: Reward | None = None
    """A number, or named numbers of which ``reward_key`` chooses one; None means not scored, 0.0 is a value."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's, and what rollout functions add."""
    images: tuple[Picture, ...] = ()
    """Pictures, in the order of their places among the tokens: the prompt's, then what turns have brought."""
    non_generation_seconds: float = 0.0
    """Seconds that the sample spent outside generation."""
    cached_tokens: VaryingInt32 = 0
    """Prompt tokens whose keys and values were reused."""
    precision: str = ""
    """What sampled the response, such as ``fp32``, ``int8`` or what a server says; several joined by ``+``; empty where
    nothing was sampled."""
    remove_sample: bool = False
    """Kept in its group, but its tokens are not to be trained on."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a dictionary form that this version does not know; written back unchanged."""
    correct: Correct = Correct.UNDEFINED
    """Whether its rollout is right, as the verdict says; what filters ask before they look at the reward."""
    sampling_mask: SamplingMask | None = None
    """What the tokens were drawn from, where ``sampling.return_sampling_mask`` asks for it."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the generate function that made it wants to know when it resumes the rollout."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """Natural-log probability of each response token under the teacher, at its temperature; None where there is no
    teacher. ``(R,)``."""
    routed_experts: RoutedExperts | None = None
    """The experts that its tokens were computed with up to the last sampled one, where
    ``sampling.return_routed_experts`` asks for them."""

    def __post_init__(self) -> None:
        length = self.response_length
        if not 0 <= length <= len(self.token_ids):
            raise ValueError(f"response_length = {length} does not fit {len(self.token_ids)} tokens")
        for name in ("loss_mask", "logprobs", "teacher_logprobs"):
            values = getattr(self, name)
            if values is not None and values.shape != (length,):
                raise ValueError(f"{name} has shape {values.shape}, the response {length} tokens")
        check_spans(self.version_spans, length)
        if self.sampling_mask is not None and len(self.sampling_mask.lengths) != length:
            raise ValueError(f"sampling_mask has {len(self.sampling_mask.lengths)} tokens, the response {length}")

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens, P."""
        return len(self.token_ids) - self.response_length

    @property
    def response_token_ids(self) -> NDArray[np.int32]:
        """The response's ids, a view. ``(R,)``."""
        return self.token_ids[self.prompt_length :]

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version in the response; None without response tokens."""
        return min((span.policy_version for span in self.version_spans), default=None)

    @property
    def oldest_trained_version(self) -> int | None:
        """The oldest policy version of a token with weight; None where there is none."""
        trained = (span for span in self.version_spans if self.loss_mask[span.start : span.end].any())
        return min((span.policy_version for span in trained), default=None)

    def without_versions_before(self, policy_version: int) -> Sample:
        """Return the sample with weight 0 for tokens of versions older than ``policy_version``."""
        loss_mask = self.loss_mask.copy()
        for span in self.version_spans:
            if span.policy_version < policy_version:
                loss_mask[span.start : span.end] = 0.0
        return replace(self, loss_mask=loss_mask)

    def get_reward_value(self, reward_key: str | None = None) -> float:
        """Return the reward, or its entry under ``reward_key`` when it is a dictionary.

        Raises:
            RewardError: If the sample is not scored, a dictionary lacks the key, or there is none to use.
        """
        if self.reward is None:
            raise RewardError(f"sample {self.index} has no reward yet (status {self.status.value})")
        if not isinstance(self.reward, dict):
            return float(self.reward)
        if reward_key is None:
            raise RewardError(
                f"sample {self.index} has a reward dictionary with {sorted(self.reward)}: set reward_key to one of them"
            )
        if reward_key not in self.reward:
            raise RewardError(
                f"sample {self.index}: reward_key = {reward_key!r} is not among its rewards {sorted(self.reward)}"
            )
        return float(self.reward[reward_key])

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of JSON values (those that users bring as given), unknown keys included."""
        record = to_dict(self)
        return {**record.pop("extra"), **record}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Sample:
        """Rebuild a sample from :meth:`to_dict`; keys it does not know are kept in ``extra``.

        Raises:
            ValueError: If a required key is missing or the lengths do not fit.
        """
        known = names_of(cls)
        extra = {key: value for key, value in record.items() if key not in known or key == "extra"}
        values = {key: value for key, value in record.items() if key not in extra}
        return from_dict(cls, {**values, "extra": extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answering of a prompt: one sample, or several when an agent forked."""

    rollout_id: int
    samples: tuple[Sample, ...]
    verdict: Verdict | None = None
    """None where it was not graded."""
    error: str | None = None
    """Why the rollout failed."""
    seconds: float = 0.0
    """Wall time of the rollout from its start to its last token, waiting included."""

    @property
    def status(self) -> SampleStatus:
        """ABORTED when a sample is; else the status of the last one."""
        if any(sample.status is SampleStatus.ABORTED for sample in self.samples):
            return SampleStatus.ABORTED
        return self.samples[-1].status if self.samples else SampleStatus.FAILED

    @property
    def has_finished(self) -> bool:
        """Whether the answering came to its own end, and so can be scored."""
        return self.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)

    @property
    def is_scored(self) -> bool:
        """Whether its grading worked."""
        return self.verdict is not None and self.verdict.outcome is Outcome.OK

    @property
    def response_tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(sample.response_length for sample in self.samples)

    def without_versions_before(self, policy_version: int) -> Rollout:
        """Return the rollout with weight 0 for tokens of versions older than ``policy_version``."""
        return replace(self, samples=tuple(sample.without_versions_before(policy_version) for sample in self.samples))

    def get_reward_value(self, reward_key: str | None = None) -> float:
        """Return the mean of the samples' rewards, as :meth:`Sample.get_reward_value` gives them.

        Raises:
            RewardError: As there.
        """
        return mean_number([sample.get_reward_value(reward_key) for sample in self.samples])

    def parts(self) -> tuple[Rollout, ...]:
        """Return what is scored by itself: the whole rollout, whose samples share a reward.

        Or its samples, each as a rollout, where a generate function gave one of several a reward of its own.
        """
        if self.is_scored or len(self.samples) < 2 or all(sample.reward is None for sample in self.samples):
            return (self,)
        return tuple(replace(self, samples=(sample,), verdict=None) for sample in self.samples)

    def with_reward(self, verdict: Verdict) -> Rollout:
        """Return the rollout scored: every one of its samples carries the verdict's reward and whether it is right."""
        samples = tuple(replace(sample, reward=verdict.reward, correct=verdict.correct) for sample in self.samples)
        return replace(self, samples=samples, verdict=verdict)

    def with_verdicts(self, verdicts: Sequence[Verdict]) -> Rollout:
        """Return the rollout with its rewards, given a verdict for each of its :meth:`parts`, in order.

        Its own verdict is the last one, with the mean of the rewards; or the first that says that a grading failed; or
        an ERROR where the rewards have no mean.
        """
        if len(verdicts) == 1:
            return self.with_reward(verdicts[0])
        verdict = next((each for each in verdicts if each.outcome is not Outcome.OK), verdicts[-1])
        samples = tuple(
            replace(sample, reward=own.reward, correct=own.correct)
            for sample, own in zip(self.samples, verdicts, strict=True)
        )
        if verdict.outcome is Outcome.OK:
            try:
                verdict = replace(verdict, reward=mean_reward([own.reward for own in verdicts]))
            except RewardError as error:
                verdict = Verdict.failed(str(error))
        return replace(self, samples=samples, verdict=verdict)


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt taken from the source, and its rollouts: as it is drawn, waits, is answered and is stored."""

    group_index: int
    """Its number in the run, given once, when it is drawn."""
    prompt: Prompt
    rollouts: tuple[Rollout, ...] = ()
    """One a member: finished ones, and aborted ones to be resumed. Empty for a prompt that is to be answered from the
    beginning."""

    @property
    def is_finished(self) -> bool:
        """Whether all rollouts have come to their own end and are scored."""
        return bool(self.rollouts) and all(each.has_finished and each.is_scored for each in self.rollouts)

    @property
    def error(self) -> str | None:
        """Why its first rollout that failed did so; None where none has."""
        return next((rollout.error for rollout in self.rollouts if rollout.error is not None), None)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, rollout after rollout."""
        return tuple(sample for rollout in self.rollouts for sample in rollout.samples)

    @property
    def response_tokens(self) -> int:
        """Response tokens of all rollouts."""
        return sum(rollout.response_tokens for rollout in self.rollouts)

    def judged(self) -> list[bool]:
        """Return whether they are right of those scored rollouts whose verdicts say so."""
        verdicts = [each.verdict for each in self.rollouts if each.verdict is not None and each.is_scored]
        return [each.correct is Correct.YES for each in verdicts if each.correct is not Correct.UNDEFINED]

    @property
    def policy_versions(self) -> set[int]:
        """The policy versions of all response tokens."""
        return {span.policy_version for sample in self.samples for span in sample.version_spans}

    @property
    def oldest_trained_version(self) -> int | None:
        """The oldest policy version of a token with weight; None where there is none."""
        versions = (sample.oldest_trained_version for sample in self.samples)
        return min((version for version in versions if version is not None), default=None)

    @property
    def trained_tokens(self) -> int:
        """Response tokens with weight, of all samples that are not removed."""
        return sum(int(np.count_nonzero(sample.loss_mask)) for sample in self.samples if not sample.remove_sample)

    def without_versions_before(self, policy_version: int) -> Group:
        """Return the group with weight 0 for tokens of versions older than ``policy_version``."""
        rollouts = tuple(rollout.without_versions_before(policy_version) for rollout in self.rollouts)
        return replace(self, rollouts=rollouts)

    def reward_values(self, reward_key: str | None = None) -> NDArray[np.float64]:
        """Return one reward a rollout, in order. ``(G,)``."""
        return np.array([rollout.get_reward_value(reward_key) for rollout in self.rollouts], np.float64)

    def advantages_of_samples(
        self, advantages_G: NDArray[np.float64], *, scale: float, reward_key: str | None = None
    ) -> NDArray[np.float64]:
        """Return each sample's advantage, in order, given one a rollout. ``(S,)``.

        That is its rollout's, and ``scale`` times what its own reward is above its rollout's.
        """
        advantages_S: list[float] = []
        for rollout, advantage in zip(self.rollouts, advantages_G.tolist(), strict=True):
            reward = rollout.get_reward_value(reward_key)
            above = [sample.get_reward_value(reward_key) - reward for sample in rollout.samples]
            advantages_S += [advantage + scale * each if each else advantage for each in above]
        return np.array(advantages_S, np.float64)


Advantages: TypeAlias = NDArray[np.float32] | tuple[NDArray[np.float32], ...]
"""One a sample, to be spread over its trained tokens, ``(S,)``; or for each sample one a response token, ``(R,)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The batch that one step hands the trainer: exactly ``rollout_batch_size`` groups, ordered by index.

    Raises:
        ValueError: If there is not one advantage a sample, or one a response token of each, or not one penalty.
    """

    step: int
    policy_version: int
    """The engine's version when the batch was cut."""
    groups: tuple[Group, ...]
    advantages_S: Advantages
    """In the order of :attr:`samples`."""
    metrics: Mapping[str, float]
    penalties_S: NDArray[np.float32] | None = None
    """What was added to each sample's reward before advantages were computed; None where nothing was. ``(S,)``."""

    def __post_init__(self) -> None:
        samples, advantages_S, penalties_S = self.samples, self.advantages_S, self.penalties_S
        if isinstance(advantages_S, tuple):
            lengths = [sample.response_length for sample in samples]
            if [len(each) for each in advantages_S] != lengths:
                raise ValueError(f"{[len(each) for each in advantages_S]} advantages for {lengths} response tokens")
        elif advantages_S.shape != (len(samples),):
            raise ValueError(f"{advantages_S.shape} advantages for {len(samples)} samples")
        if penalties_S is not None and penalties_S.shape != (len(samples),):
            raise ValueError(f"{penalties_S.shape} penalties for {len(samples)} samples")

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, group after group."""
        return tuple(sample for group in self.groups for sample in group.samples)
