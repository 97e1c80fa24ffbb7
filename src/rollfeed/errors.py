"""The error tree, sorted by what the caller can do about it.

RollfeedError
├── ConfigError                a setting or an input is wrong; raised before anything starts (also a ValueError)
│   ├── PluginError            an import path is wrong, or what it names does not fit its protocol
│   ├── DataError              a prompt file is missing, unreadable or has a bad row
│   ├── CheckpointError        a model or tokenizer cannot be loaded
│   └── RunDirectoryError      a run directory is not writable, or belongs to another run
├── EngineError                the inference engine misbehaved
│   ├── EngineUnavailableError   retryable: the engine is closed, restarting or unreachable
│   └── EngineProtocolError      not retryable: a request or a reply breaks the contract
├── RewardError                a reward function raised, or returned something that is not a reward
├── WorkerError                a call in a worker process gave no result
│   ├── WorkerTimeoutError       it was not done by its deadline; its process has been killed
│   ├── WorkerDiedError          its process died, or could not be started
│   └── WorkerCallError          the function raised, or took or returned what cannot cross the process boundary
├── SandboxError               a sandbox could not run a program; says nothing about the program
├── ToolError                  a tool has no answer to a call; what it says is told to the policy
└── RunFailedError             the run cannot go on: failure budget spent, too many draws for a batch, stalled
    ├── PictureMismatchError     an engine has seen other pictures than it was sent
    ├── PromptsEndedError        the prompt source has ended and what is left fills no batch
    └── SourceFailedError        nothing can be drawn from a prompt source any more
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "COMPUTING_ERRORS",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EngineProtocolError",
    "EngineUnavailableError",
    "PictureMismatchError",
    "PluginError",
    "PromptsEndedError",
    "RewardError",
    "RollfeedError",
    "RunDirectoryError",
    "RunFailedError",
    "SandboxError",
    "SourceFailedError",
    "ToolError",
    "WorkerCallError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
    "in_one_line",
    "suggestion",
]


class RollfeedError(Exception):
    """Root of every error that rollfeed raises on purpose."""


class ConfigError(RollfeedError, ValueError):
    """A setting or an input is wrong; nothing has been started."""


class PluginError(ConfigError):
    """An import path cannot be loaded, or what it names does not fit its protocol."""


class DataError(ConfigError):
    """A prompt file is missing, unreadable, empty or has a bad row."""


class CheckpointError(ConfigError):
    """A model checkpoint or its tokenizer cannot be loaded."""


class RunDirectoryError(ConfigError):
    """A run directory cannot be written, or holds another run."""


class EngineError(RollfeedError):
    """The inference engine misbehaved."""

    status: int | None = None
    """Of HTTP, where a server refused with one."""


class EngineUnavailableError(EngineError):
    """The engine is closed, restarting or unreachable; the same request may succeed later."""


class EngineProtocolError(EngineError):
    """A request or a reply breaks the contract; repeating it cannot help."""


class RewardError(RollfeedError):
    """A reward function raised, or returned something that is not a reward."""


class WorkerError(RollfeedError):
    """A call in a worker process gave no result."""


class WorkerTimeoutError(WorkerError):
    """A call was not done by its deadline; its process has been killed."""


class WorkerDiedError(WorkerError):
    """The process of a call died before it answered, or could not be started."""


class WorkerCallError(WorkerError):
    """A called function raised, or an argument or its result is not JSON or too large."""


class SandboxError(RollfeedError):
    """A sandbox could not run a program; this says nothing about the program."""


class ToolError(RollfeedError):
    """A tool has no answer to a call; the message is what the policy is told."""


class AgentError(RollfeedError):
    """An agent went wrong: its rollout has failed, and no other."""


class RunFailedError(RollfeedError):
    """The run cannot go on; what was committed stays readable and can be resumed."""


class PictureMismatchError(RunFailedError):
    """An engine has seen other pictures than it was sent, or none: every answer of it would be learned blindly."""


class PromptsEndedError(RunFailedError):
    """The prompt source has ended, and what is left of it fills no batch; the batches before are whole."""


class SourceFailedError(RunFailedError):
    """Nothing can be drawn from a prompt source any more; what was drawn before can still be trained on."""


COMPUTING_ERRORS = (RuntimeError, MemoryError)
"""What PyTorch and numpy raise where a computation fails: no memory left, shapes that do not fit, a broken device."""
_LONGEST_LINE = 300


def in_one_line(error: BaseException) -> str:
    """Return kind and message of an error that is not rollfeed's own; of several lines, the first with text."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    message = next((line for line in lines if line), "")
    return f"{type(error).__name__}: {message}"[:_LONGEST_LINE].removesuffix(": ")


def suggestion(word: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """Return what to tell who wrote ``word``: the nearest known one, else ``otherwise``, else all that are known."""
    names = sorted(known)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if nearest:
        return f"did you mean {nearest[0]}?"
    return otherwise if otherwise is not None else f"known here: {', '.join(names) or 'none'}"
