"""Problems made by index: of built-in environments in this process, of all others in workers that can be killed."""

from rollfeed.environments.making.maker import (
    EnvironmentFacts,
    TaskFailedError,
    TaskFailureKind,
    TaskMaker,
)
from rollfeed.environments.making.pooled import PooledTaskMaker, describe_environments, worker_failure

__all__ = [
    "EnvironmentFacts",
    "PooledTaskMaker",
    "TaskFailedError",
    "TaskFailureKind",
    "TaskMaker",
    "describe_environments",
    "worker_failure",
]
