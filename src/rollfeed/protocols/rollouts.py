"""From prompt to batch: engines, environments, filters, advantages, and who is told of what happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollfeed.types import (
    Completion,
    EngineLoad,
    FilterDecision,
    Group,
    Picture,
    Rollout,
    Sample,
    SamplingParams,
    StepCommit,
    Verdict,
    WeightUpdate,
)

if TYPE_CHECKING:
    from torch import Tensor


class TokenEndpoint(Protocol):
    """The part of an engine that a generate function may use: tokens in, tokens out."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next request will meet."""

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """Sample one response to ``token_ids`` ``(P,)``.

        An aborted request returns what it has, with finish reason ABORT.

        Raises:
            EngineUnavailableError: If the engine is closed or unreachable.
            EngineProtocolError: If the request can never be served, for example over the context.
        """


class Engine(TokenEndpoint, Protocol):
    """The inference engine. Entered with ``async with``; leaving it ends everything it started."""

    precision: str
    max_running_requests: int
    """How many requests it works on at once; more wait inside."""
    context_length: int
    """Prompt and response tokens of one request together."""
    vocab_size: int
    """Ids of tokens are below it."""
    is_exact: bool
    """Whether tokens and logprobs are those sampled; otherwise they are of the text, and NaN."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or with None all that run or wait; unknown ids are fine."""

    async def pause(self) -> None:
        """Stop decoding between two steps; requests stay where they are."""

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""

    async def apply(self, update: WeightUpdate) -> None:
        """Replace weights between two steps; no step and no request sees half of an update.

        Every engine takes a :class:`TensorUpdate` and a :class:`FolderUpdate`; servers also what their transport makes.

        Raises:
            EngineProtocolError: If the update is of a form that the engine does not take, cannot be read or does not
                fit, by a name, a shape or a value that is not finite; nothing is changed.
            EngineUnavailableError: If no server is left that has the weights.
        """

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        """Return what each server says of texts under its present weights, by the server's name.

        Of each text, all tokens but the first have a natural-log probability, before any temperature; ``(N,)``, text
        after text. They are computed, not taken from a cache of keys and values. Empty where an engine cannot, or is
        paused.

        Args:
            texts: Token ids, at least two each.

        Raises:
            EngineError: If a server that can does not.
        """
        del texts
        return {}

    async def load(self) -> EngineLoad:
        """Return how many requests run and wait."""

    def metrics(self) -> Mapping[str, float]:
        """Return totals since the start and present values by name; none where an engine counts nothing."""
        return {}

    async def health(self) -> None:
        """Return when the engine can serve. Raises EngineUnavailableError if it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of an environment, determined by (environment, version, split, level, index, run seed)."""

    environment: str
    """Namespaced id, for example ``core/copy_text``."""
    version: int
    level: int
    seed: int
    """64 bits, derived; the task can be made again from it."""
    question: str
    """The user's turn, the format instruction included."""
    params: Mapping[str, Any]
    """JSON values that describe the instance; what ``verify`` needs."""
    answer: str | None = None
    """One right answer, where the environment knows one."""
    hidden: str = ""
    """What tells it from others that ask the same question, in text."""
    pictures: tuple[str, ...] = ()
    """Data URIs, for the places ``<image>`` in the question."""

    @property
    def identity(self) -> str:
        """The text that makes it another problem than others."""
        return self.question + self.hidden


class Environment(Protocol):
    """A generator of problems with a verifier. *Extension point* (registered by id).

    Both methods are pure: the same arguments give the same result, and no global random state is
    read or written.
    """

    environment_id: str
    version: int
    """Raised when the same (level, seed) would give another task or another verdict."""
    summary: str
    """One line for ``rollfeed env list``."""
    max_level: int | None
    """The hardest level, or None when there is always a harder one."""

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Return question, params and, where known, one right answer.

        Pictures are data URIs, such as ``data:image/png;base64,...``, in a list that params have as ``pictures``, each
        with a place ``<image>`` in the question; ``verify`` may be given params without them.
        """

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Grade a response: reward in [0, 1], and ``correct``."""


class GroupFilter(Protocol):
    """Decides whether a scored group teaches something. *Extension point*."""

    def __call__(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return Keep or Drop(reason) for the samples of one group."""


class AdvantageFn(Protocol):
    """Turns the rewards of one group into advantages. *Extension point*.

    Where it returns one a rollout, and samples of a rollout have rewards of their own, what a sample's is above the
    rollout's counts, too, as much as rewards do in the group: by the slope of the line through its rollouts.
    """

    def __call__(
        self, rewards_G: NDArray[np.float64], *, group: Group
    ) -> NDArray[np.float64] | Sequence[NDArray[np.float64]]:
        """Return one advantage a rollout or a sample, ``(G,)`` or ``(S,)``; or for each sample one a token, ``(R,)``.

        ``rewards_G`` has the reward of each rollout, the mean of its samples'; tokens are those of the response, with
        inserted ones.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The trained tokens of a micro-batch, on the trainer's device: all of some samples, which lie in any order.

    Which samples are together depends on their lengths and on ``train.micro_batch_tokens``; those of a group may be
    apart. Nothing of it may be changed. All are of shape ``(T,)``, and log-probabilities natural ones.
    """

    logprobs_T: Tensor
    """The trainer's, with a gradient."""
    entropy_T: Tensor
    """Of what predicts each token, over the whole vocabulary; with a gradient."""
    old_logprobs_T: Tensor
    """Of the policy that ratios compare with (``train.loss.old_logprobs``): the trainer's before the batch's first
    update, or the engine's.
    """
    rollout_logprobs_T: Tensor
    """The engine's, as the tokens were sampled."""
    reference_logprobs_T: Tensor | None
    """The reference's; None where neither ``kl_coefficient`` nor ``reference_checkpoint`` asks for one."""
    advantages_T: Tensor
    mask_T: Tensor
    """The loss mask, which is nowhere 0 but in micro-batches that stand in for none."""
    weights_T: Tensor
    """By ``train.loss.normalisation``: what a token's loss is multiplied with before those of a batch are added up."""
    versions_T: Tensor
    """The version of the weights that sampled each token; -1 where nobody says."""
    policy_version: int
    """That of the batch: of the weights that are trained, before its first update."""
    sequence_ids_T: Tensor
    """Equal for the tokens of one sample, which are in their order; from 0."""
    settings: Any
    """``[train.loss]``, for functions that go by its clipping range and the like."""


class LossFn(Protocol):
    """A policy loss in the place of the built-in ones. *Extension point*.

    The divergence from the reference, the entropy and the correction for the engine are added as the settings say.
    """

    def __call__(self, inputs: LossInputs) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each token, ``(T,)``, with a gradient; or that and metrics, ``(T,)`` each, by name.

        Tokens are weighted and added up by ``weights_T``. One number instead, ``()``, is this micro-batch's part of the
        loss as it is: it should be such a sum itself, so that it does not matter how samples are packed. Metrics are
        the mean over trained tokens, as ``train/loss_function/NAME``; every call gives the same ones.
        """


class RolloutObserver(Protocol):
    """Is told what happens in a step, as it happens; must return quickly and not raise."""

    def step_started(self, step: int) -> None:
        """A step begins."""

    def group_submitted(self, group: Group) -> None:
        """Work on a prompt begins."""

    def rollout_finished(self, rollout: Rollout) -> None:
        """One answering has ended, well or not; it is not scored yet."""

    def group_decided(self, group: Group, decision: FilterDecision) -> None:
        """A finished group is kept or dropped."""

    def waiting(self, message: str) -> None:
        """Nothing has finished for a while; ``message`` says what the step waits for."""

    def step_finished(self, commit: StepCommit) -> None:
        """The step's batch is complete and stored."""
