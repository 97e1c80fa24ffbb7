"""Answering one prompt once: what a generate function is asked, and what it may use."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollfeed.errors import RunFailedError
from rollfeed.protocols.episodes import RewrittenTurns
from rollfeed.protocols.execution import SandboxProvider, Workers
from rollfeed.protocols.prompts import PictureInput, Tokenizer
from rollfeed.protocols.rollouts import Environment, TokenEndpoint
from rollfeed.protocols.tools import Toolbox
from rollfeed.types import Prompt, Sample, SamplingParams, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One answering to be done."""

    prompt: Prompt
    params: SamplingParams
    """Seeded for this rollout; ``max_new_tokens`` is the whole response's budget."""
    group_index: int
    index: int
    rollout_id: int
    step: int
    max_context_length: int
    """Prompt and response together may not be longer."""
    partial: Sample | None = None
    """What an earlier, aborted execution left; its tokens are kept and continued."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The ``state`` of the last sample of an earlier, aborted execution, whether it can be resumed or not."""
    evaluation: bool = False
    """Whether the answer measures the policy and is not trained on."""


class Environments(Protocol):
    """Environments by namespaced id."""

    def get(self, environment_id: str) -> Environment:
        """Return an environment. Raises ConfigError if there is none of that id."""

    def steps_path(self, environment_id: str) -> str | None:
        """Return the function path of an environment's methods in workers; None for those that are called here."""


class _NotThere:
    """Stands for a service that a run has not been given; says so when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise RunFailedError(
            f"services.{self._name} is not there: this run was made without; open_rollouts and `rollfeed run` have it"
        )


class TurnJournal:
    """Records what rollouts have done in their turns, until their groups have ended; this one is in memory.

    The one of a run directory keeps it on the disk, too.
    """

    def __init__(self) -> None:
        self._turns: dict[int, dict[int, list[Turn]]] = {}
        """By group and rollout."""

    def turns(self, request: RolloutRequest) -> Sequence[Turn]:
        """Return what earlier executions of a rollout did, in order."""
        return tuple(self._turns.get(request.group_index, {}).get(request.rollout_id, ()))

    def write(self, request: RolloutRequest, turn: Turn) -> None:
        """Append to what a rollout has done; it survives the end of the process."""
        self._turns.setdefault(request.group_index, {}).setdefault(request.rollout_id, []).append(turn)

    async def flush(self) -> None:
        """Return when everything written survives the end of the machine, too."""

    def forget(self, group_index: int, *, step: int) -> None:
        """Forget what a group's rollouts did, which ends or begins again in a step; on the disk when that is stored."""
        self._turns.pop(group_index, None)


_NO_ENVIRONMENTS: Any = _NotThere("environments")
_NO_SANDBOXES: Any = _NotThere("sandboxes")
_NO_WORKERS: Any = _NotThere("workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Things that a generate function may use. What starts processes does so when it is first used."""

    endpoint: TokenEndpoint
    """The engine; once the step has been aborted, it answers every request with an empty completion that says ABORT."""
    tokenizer: Tokenizer
    default: GenerateFn
    """The built-in generate function, to be wrapped."""
    environments: Environments = _NO_ENVIRONMENTS
    sandboxes: SandboxProvider = _NO_SANDBOXES
    """Where programs of the policy run."""
    workers: Workers = _NO_WORKERS
    """Processes that can be killed, for functions that may hang."""
    step_timeout_seconds: float = 5.0
    """For a step of an environment that workers or its server take."""
    journal: TurnJournal = field(default_factory=TurnJournal)
    """What answerings of several turns have done; see :class:`rollfeed.generate.Episode`."""
    tools: Toolbox | None = None
    """What policies may call, and the limits of episodes; None has neither."""
    rewritten_turns: RewrittenTurns = RewrittenTurns.FORK
    """What episodes do where the chat template shows earlier turns otherwise than they were said."""
    environments_judge: bool = True
    """Whether environments that answer back give their episodes' rewards, which are scored like others otherwise."""
    picture_input: PictureInput | None = None
    """The way of pictures into turns; None where nothing brings any."""


class GenerateFn(Protocol):
    """Answers a prompt once. *Extension point*; the default is ``generate.default_generate``."""

    async def __call__(self, request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
        """Return the samples of the rollout, at least one.

        They share the reward that the last of them is given; where one brings a reward, each keeps or is given its own.
        """


class SampleHook(Protocol):
    """Sees, and may replace, every finished sample before it is scored. *Extension point*. May be async."""

    def __call__(self, sample: Sample, prompt: Prompt) -> Sample | Awaitable[Sample]:
        """Return the sample to use."""
