"""MLflow: where ``MLFLOW_TRACKING_URI`` says, else ``mlflow.db`` in the current folder, which ``mlflow ui`` shows."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from time import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from rollfeed.protocols import SampleRow, TrackedRun

_MAX_PARAMETERS, _MAX_CHARACTERS = 100, 6000
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)


class MlflowTracker:
    """Logs metrics by step, and tables of samples as files. A run that goes back goes on as another one."""

    def start(self, run: TrackedRun) -> str:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = client = MlflowClient()
        if run.going_on is not None:
            self._run_id = run.going_on
            client.update_run(self._run_id, status="RUNNING")
            return self._run_id
        experiment = client.get_experiment_by_name(run.project)
        number = client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        tags = {} if run.group is None else {"group": run.group}
        self._run_id = client.create_run(number, run_name=run.name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:_MAX_CHARACTERS]) for key, value in run.settings.items()]
        for first in range(0, len(params), _MAX_PARAMETERS):
            client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMETERS])
        return self._run_id

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        now = int(time() * 1000)
        self._client.log_batch(
            self._run_id, metrics=[Metric(_name(name), value, now, step) for name, value in metrics.items()]
        )

    def log_samples(self, rows: Sequence[SampleRow], *, step: int, name: str) -> None:
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self._run_id, table, f"{_name(name)}/step-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _name(name: str) -> str:
    """Return a name that MLflow takes: ``pass_at_4`` for ``pass@4``, ``pass_hat_4`` for ``pass^4``."""
    return _REFUSED.sub("_", name.replace("@", "_at_").replace("^", "_hat_"))
