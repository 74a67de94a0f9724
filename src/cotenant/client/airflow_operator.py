"""An operator of Airflow 2 or 3 that runs a command as a job. Only Airflow's own processes import this module.

>>> def dag() -> None:
...     CotenantOperator(task_id="train", command=["python3", "train.py"], fields={"gpus": 1, "cpus": "auto"})
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cotenant.client.blocking import Client, Job
from cotenant.client.job_fields import JobFields

HOMES = ("airflow.sdk", "airflow.models")  # of Airflow 3, and 2


def _base() -> Any:
    """Return Airflow's base class of operators.

    Raises:
        ImportError: Airflow is not installed.
    """
    try:
        return import_module(HOMES[0]).BaseOperator
    except ImportError:
        return import_module(HOMES[1]).BaseOperator


if TYPE_CHECKING:

    class BaseOperator:
        """What is used of Airflow's class."""

        log: Any

        def __init__(self, **kwargs: Any) -> None: ...
else:
    BaseOperator = _base()


class CotenantOperator(BaseOperator):
    """Runs a command as a job and returns its output; its lines are in the task's log.

    A try of a task is one job: a worker of Airflow that is restarted within a try finds the job again. A job that fails
    fails the task, and clearing or killing the task cancels the job. `fields` are the fields of a job file; they are in
    a mapping because Airflow has `queue` and `retries` of its own. `connection` has the arguments of `cotenant.Client`.
    """

    template_fields: Sequence[str] = ("command", "fields")

    def __init__(
        self,
        *,
        command: str | Sequence[str],
        fields: JobFields | None = None,
        connection: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.command, self.fields, self.connection = command, fields or JobFields(), connection or {}
        self._job: Job | None = None

    def execute(self, context: Mapping[str, Any]) -> str:
        """Run the job, and return the last part of its output.

        Raises:
            JobFailed: the job failed.
            InvalidArgument: names every bad field.
        """
        with Client(**self.connection) as client:
            job = client.submit(self.command, request_id=request_id_of(context["ti"]), **self.fields)
            self._job = job
            self.log.info("job %s", job.id)
            for line in job.logs():
                self.log.info("%s", line)
            return job.result()

    def on_kill(self) -> None:
        """Cancel the job."""
        if self._job:
            with Client(**self.connection) as client:
                client.job(self._job.id).cancel()


def request_id_of(task: Any) -> str:
    """Return the request id of a try of a task: another try is another job.

    >>> from types import SimpleNamespace
    >>> request_id_of(SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1))
    'airflow-0d69dda84837e11e651157f47086527d'
    """
    parts = (task.dag_id, task.run_id, task.task_id, task.map_index, task.try_number)
    return f"airflow-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"
