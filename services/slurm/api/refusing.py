"""Everything that would change something is refused: the jobs and nodes belong to Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.core.model.validation import shown

BELONGS_TO_SLURM = "BELONGS_TO_SLURM"

OF_JOBS: Mapping[str, str] = MappingProxyType(
    {
        "CancelJob": "scancel {id}",
        "SuspendJob": "scontrol suspend {id}",
        "ResumeJob": "scontrol resume {id}, or scontrol release {id} if it is held",
        "UpdateJob": "scontrol update JobId={id}",
        "MoveJob": "scontrol requeue {id}",
        "CancelArray": "scancel {id}",
        "SuspendArray": "scontrol suspend {id}",
        "ResumeArray": "scontrol resume {id}",
        "ReadLogs": "its output is in the file that `scontrol show job {id}` names",
        "ReadFiles": "its files are in the directory that `scontrol show job {id}` names",
        "OpenSession": "srun --overlap --jobid=ID --pty bash",
    }
)
OF_NODES: Mapping[str, str] = MappingProxyType(
    {
        "DrainNode": "scontrol update NodeName={id} State=DRAIN Reason=…",
        "CordonNode": "scontrol update NodeName={id} State=DRAIN Reason=…",
        "UncordonNode": "scontrol update NodeName={id} State=RESUME",
        "ForgetNode": "remove it from slurm.conf",
        "ReleaseGpu": "scontrol update NodeName={id} Gres=…",
    }
)


def refusal(method: str, target: str = "") -> Problem:
    """Return the problem of a call that would change something.

    >>> refusal("CancelJob", "17").message
    'this job belongs to Slurm: scancel 17'
    """
    what, remedy = "this belongs to Slurm", "use Slurm's own commands"
    if method in OF_JOBS:
        what, remedy = "this job belongs to Slurm", OF_JOBS[method]
    elif method in OF_NODES:
        what, remedy = "this node belongs to Slurm", OF_NODES[method]
    elif method.startswith("Create") and method.endswith(("Job", "Array")):
        what, remedy = "this cluster's jobs belong to Slurm", "submit it with sbatch"
    elif "Tenant" in method:
        what, remedy = "tenants are accounts of Slurm", "sacctmgr"
    return errors.failed_precondition(BELONGS_TO_SLURM, f"{what}: {remedy.replace('{id}', target or 'ID')}")


def refusing(service: ServiceDescriptor, base: type[Any]) -> type[Any]:
    """Return a servicer class that refuses each method which `base` does not define itself."""

    def unary(name: str) -> Any:
        async def refuse(self: Any, request: Any, context: Any) -> Any:
            raise refusal(name, _target(request))

        return refuse

    def streaming(name: str, *, of_requests: bool) -> Any:
        async def refuse(self: Any, request: Any, context: Any) -> Any:
            raise refusal(name, "" if of_requests else _target(request))
            yield

        return refuse

    methods = {
        method.name: streaming(method.name, of_requests=method.client_streaming)
        if method.server_streaming
        else unary(method.name)
        for method in service.methods
        if method.name not in vars(base)
    }
    return type(base.__name__, (base,), methods)


def _target(request: Any) -> str:
    """Return the id in a request, as it may be shown."""
    holder = request if hasattr(request, "id") else getattr(request, "job", None) or getattr(request, "node", None)
    return shown(str(getattr(holder, "id", ""))).strip("'\"")[:80]
