"""submitit's executor `cotenant`: functions that submitit pickles run as jobs of a mesh, without Slurm's commands.

`submitit.AutoExecutor(folder="logs", cluster="cotenant")` uses it; without `cluster`, submitit prefers Slurm where it
finds `srun`, and a configured mesh to processes on this machine. Other fields of a job have the executor's name before
them: `executor.update_parameters(timeout_min=60, cotenant_priority=5)`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from submitit.core import core, job_environment
from submitit.core.logger import get_logger

from cotenant.client.blocking import Client
from cotenant.client.errors import CotenantError, NotFound
from cotenant.client.job_fields import JobFields
from cotenant.client.remote_functions import own_client
from cotenant.core.model.lifecycle import Phase
from cotenant.rpc.access import AccessError, find

R = TypeVar("R", covariant=True)

GENERIC = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
VARIABLES = {"%j": '"$COTENANT_JOB_ID"', "%A": '"$COTENANT_JOB_ID"', "%t": '"$RANK"'}  # in the folder's name
NO_FILE = "only the base class's _submit_command writes a submission file, and it is replaced"
UNAVAILABLE, CLUSTER = -1, 2  # affinities, as submitit defines them
STATES = {
    Phase.QUEUED: "PENDING",
    Phase.STARTING: "PENDING",
    Phase.RUNNING: "RUNNING",
    Phase.STOPPING: "COMPLETING",
    Phase.SUSPENDED: "PENDING",
    Phase.SUCCEEDED: "COMPLETED",
    Phase.FAILED: "FAILED",
    Phase.CANCELLED: "CANCELLED",
}


def _client() -> Client:
    return own_client(os.getpid())


class CotenantWatcher(core.InfoWatcher):
    """Asks the mesh for the states of the jobs that have not ended."""

    def update(self) -> None:
        """Read the states of all jobs that are watched."""
        self._num_calls += 1
        for job_id in sorted(self._registered - self._finished):
            try:
                status = _client().job(job_id).last_status
                self._info_dict[job_id] = {
                    "JobID": job_id,
                    "State": STATES[Phase(status.phase)],
                    "Reason": status.detail,
                }
                if status.ended:
                    self._finished.add(job_id)
            except NotFound:
                self._info_dict[job_id] = {"JobID": job_id, "State": "MISSING"}
                self._finished.add(job_id)
            except CotenantError as error:  # as submitit does where Slurm does not answer
                get_logger().warning(f"the state of job {job_id} is not known now: {error}")
        self._last_status_check = time.time()

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state of a job by Slurm's names; UNKNOWN before the first answer."""
        return str(self.get_info(job_id, mode=mode).get("State", "UNKNOWN"))


class CotenantJob(core.Job[R]):
    """A job of a mesh, as submitit sees it."""

    watcher = CotenantWatcher(delay_s=15)

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; without `check`, an error is only logged."""
        try:
            _client().job(self.job_id).cancel()
        except CotenantError as error:
            if check:
                raise
            get_logger().warning(f"job {self.job_id} was not cancelled: {error}")


class CotenantJobEnvironment(job_environment.JobEnvironment):
    """What a function learns of its job while it runs there."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "COTENANT_JOB_ID",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "SUBMITIT_COTENANT_NODES",
        "node": "NODE_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    def _requeue(self, countdown: int) -> None:
        """Do nothing: a preempted job waits again by itself, with its id, and reads the checkpoint then."""


class CotenantExecutor(core.PicklingExecutor):
    """Submits pickled functions as jobs. The folder has to be visible to the nodes."""

    job_class = CotenantJob

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = python or sys.executable
        self._throttling = 0.0  # of seconds between two submissions: the mesh limits callers itself

    @classmethod
    def affinity(cls) -> int:
        """Return how well this executor fits: like any cluster if a mesh is configured."""
        try:
            find(None, os.environ)
        except AccessError:
            return UNAVAILABLE
        return CLUSTER

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(JobFields.__annotations__)

    def _num_tasks(self) -> int:
        return int(self.parameters.get("nodes", 1)) * int(self.parameters.get("tasks_per_node", 1))

    def _submit_command(self, command: str) -> core.Job[Any]:
        script = with_logs(self.folder, together=bool(self.parameters.get("stderr_to_stdout")))
        words = ["sh", "-c", script, "cotenant-submitit", *shlex.split(command)]
        job = _client().submit(words, **job_fields(self.parameters))
        return self.job_class(folder=self.folder, job_id=job.id, tasks=list(range(self._num_tasks())))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError(NO_FILE)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError(NO_FILE)

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError(NO_FILE)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([self.python, "-u", "-m", "submitit.core._submit", str(self.folder)])


def job_fields(parameters: dict[str, Any]) -> Any:
    """Return the fields of a job: submitit's own parameters in our terms, and fields by their names, which win.

    Raises:
        ValueError: the GPUs of a node cannot be divided among its tasks.

    >>> job_fields({"nodes": 2, "tasks_per_node": 2, "gpus_per_node": 4, "timeout_min": 90})["gpus"]
    2
    """
    own = {name: value for name, value in parameters.items() if name not in GENERIC and name != "stderr_to_stdout"}
    nodes, per_node = int(parameters.get("nodes", 1)), int(parameters.get("tasks_per_node", 1))
    gpus, memory = int(parameters.get("gpus_per_node", 0)), float(parameters.get("mem_gb", 0))
    if gpus % per_node:
        raise ValueError(f"gpus_per_node={gpus} cannot be divided among tasks_per_node={per_node}")
    found: dict[str, Any] = {"name": str(parameters.get("name", "submitit")), "signal": "SIGUSR2"}
    if "cpus_per_task" in parameters:
        found["cpus"] = int(parameters["cpus_per_task"])
    if gpus:
        found["gpus"] = gpus // per_node
    if memory:
        found["memory"] = f"{int(memory * 1024 / per_node)}Mi"
    if "timeout_min" in parameters:
        found["time_limit"] = f"{parameters['timeout_min']}m"
    if nodes * per_node > 1:
        found["replicas"] = nodes * per_node
    variables = {"SUBMITIT_EXECUTOR": "cotenant", "SUBMITIT_COTENANT_NODES": str(nodes)}
    return {**found, **own, "env": {**dict(own.get("env") or {}), **variables}}


def with_logs(folder: Path, *, together: bool) -> str:
    """Return a shell script that runs its arguments with their output in the files where submitit looks for it.

    >>> with_logs(Path("/logs/%j"), together=True)
    'd=/logs/"$COTENANT_JOB_ID"; mkdir -p "$d"; exec "$@" >>"$d/${COTENANT_JOB_ID}_${RANK}_log.out" 2>&1'
    """
    parts = re.split("(%[jAt])", str(folder))
    directory = "".join(VARIABLES.get(part) or (shlex.quote(part) if part else "") for part in parts)
    log = '"$d/${COTENANT_JOB_ID}_${RANK}_log.'
    errors = "2>&1" if together else f'2>>{log}err"'
    return f'd={directory}; mkdir -p "$d"; exec "$@" >>{log}out" {errors}'
