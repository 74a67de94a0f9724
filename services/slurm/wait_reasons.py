"""Slurm's reasons why a job waits, as reasons of ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from cotenant.core.model.refusal import Code, Refusal
from cotenant.services.slurm.records import SlurmJob

RESOURCES = frozenset({"", "Resources", "Priority", "NodesNotAvail", "None"})  # waits for its places only

Answer = tuple[Code, str, str]

_EXTERNAL: Mapping[str, Answer] = MappingProxyType(
    {
        "JobHeldUser": (Code.SUSPENDED, "its user holds it", "scontrol release"),
        "JobHeldAdmin": (Code.SUSPENDED, "an administrator holds it", "an administrator releases it"),
        "Dependency": (Code.DEPENDENCY, "it waits for other jobs", "these jobs end"),
        "DependencyNeverSatisfied": (Code.DEPENDENCY, "its dependency can no longer be met", "scancel it"),
        "BeginTime": (Code.BEGIN_TIME, "its begin time is to come", "its begin time"),
        "JobArrayTaskLimit": (Code.ARRAY_LIMIT, "its array is at its limit", "a task of its array ends"),
        "PartitionDown": (Code.NO_NODES, "its partition is down", "an administrator opens the partition"),
        "PartitionInactive": (Code.NO_NODES, "its partition is inactive", "an administrator opens the partition"),
        "ReqNodeNotAvail": (Code.NO_NODES, "a node that it requires takes no jobs", "the node returns"),
        "Reservation": (Code.BEGIN_TIME, "its reservation has not begun", "its reservation begins"),
        "ReservationDeleted": (Code.DEPENDENCY, "its reservation is gone", "scontrol update Reservation="),
        "Licenses": (Code.DEPENDENCY, "no license is free", "a license is returned"),
        "BadConstraints": (Code.NEVER_FITS, "no node meets its constraints", "it asks for other nodes"),
        "PartitionNodeLimit": (Code.NEVER_FITS, "it asks for more nodes than its partition allows", "fewer nodes"),
        "PartitionTimeLimit": (Code.NEVER_FITS, "its time limit is beyond its partition's", "a shorter time limit"),
        "InvalidAccount": (Code.QUOTA, "its account is not valid", "another account"),
        "InvalidQOS": (Code.QUOTA, "its QOS is not valid", "another QOS"),
        "Prolog": (Code.BACK_OFF, "its prolog runs or has failed", "the prolog ends"),
        "Cleaning": (Code.BACK_OFF, "it is cleaned up after its last run", "the cleaning ends"),
        "JobHoldMaxRequeue": (Code.SUSPENDED, "it was requeued too often", "scontrol release"),
        "launch failed requeued held": (Code.SUSPENDED, "its launch failed, and it is held", "scontrol release"),
    }
)
_LIMITS = ("QOS", "Assoc", "Grp", "Max", "User", "Account")


def external_reason(job: SlurmJob) -> Refusal | None:
    """Return why a job would wait on an empty cluster too; None if it waits for places only.

    >>> external_reason(SlurmJob("17", 17, reason="JobHeldUser", priority=0)).code.value
    'SUSPENDED'
    >>> external_reason(SlurmJob("17", 17, reason="Resources", priority=1)) is None
    True
    """
    reason = job.reason
    if job.held and reason in RESOURCES:
        reason = "JobHeldUser"
    if reason in RESOURCES:
        return None
    found = _EXTERNAL.get(reason) or _EXTERNAL.get(reason.partition(",")[0].strip())
    if found is None and (reason.endswith(("Limit", "MinGPUSNode")) or reason.startswith(_LIMITS)):
        found = Code.QUOTA, "a limit of its account, user or QOS is reached", "jobs under the same limit end"
    code, detail, remedy = found or (Code.NOT_YET_CONSIDERED, "for a reason of Slurm", "see `scontrol show job`")
    said = f"{detail} (Slurm: {reason}{_more(job, code)})"
    return Refusal(code, said, f"{remedy} {job.id}" if remedy.startswith("sc") and remedy[-1] != "=" else remedy)


def _more(job: SlurmJob, code: Code) -> str:
    if code is Code.DEPENDENCY and job.dependency:
        return f", {job.dependency}"
    if code is Code.BEGIN_TIME and job.eligible_seconds:
        return f", {datetime.fromtimestamp(job.eligible_seconds, UTC):%Y-%m-%d %H:%M} UTC"
    return ""
