"""`scontrol`: shows and changes jobs and nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import CommandError
from cotenant.cli.slurm import patterns, sizes, times
from cotenant.cli.slurm.conventions import BATCH_ARGUMENTS, QUEUE
from cotenant.cli.slurm.facts import NONE, Facts
from cotenant.cli.slurm.finding import call, find_one, in_order, list_jobs
from cotenant.cli.slurm.job_ids import read_ids
from cotenant.cli.slurm.nodes import compressed, expanded
from cotenant.cli.slurm.nodes import state_of as state_of_node
from cotenant.cli.slurm.outcome import FAILED, SlurmError, of_mesh
from cotenant.cli.slurm.sinfo import list_nodes
from cotenant.cli.slurm.states import LIVE_PHASES
from cotenant.codec.times import duration
from cotenant.v1.job_pb2 import JOB_PHASE_QUEUED, JOB_PHASE_RUNNING, Job, JobSpec
from cotenant.v1.job_service_pb2 import (
    JOB_VIEW_FULL,
    JobFilter,
    MoveJobRequest,
    ResumeJobRequest,
    SuspendJobRequest,
    UpdateJobRequest,
)
from cotenant.v1.node_service_pb2 import Node

NAME = "scontrol"
FLAGS = ("-o", "--oneliner", "-d", "--details", "-dd", "-a", "--all", "-Q", "--quiet", "-v", "--verbose")
HELP = """\
Usage: scontrol [-o] COMMAND
Commands: show job [ID], show node [NAME], show partition, show hostnames [LIST], show hostlist LIST, hold ID…,
release ID…, suspend ID…, resume ID…, requeue ID…, update jobid=ID FIELD=VALUE…, ping."""
FIXED = "Requested operation is presently disabled"
CHANGEABLE = ("timelimit", "priority", "jobname", "name", "comment", "requeue", "nice")
FIXED_FIELDS = {  # what Slurm changes and Cotenant does not, in Slurm's spelling
    name.lower(): name
    for name in (
        *("Account", "ArrayTaskThrottle", "BurstBuffer", "CPUsPerTask", "Deadline", "Dependency", "EligibleTime"),
        *("EndTime", "ExcNodeList", "Features", "Gres", "Licenses", "MinCPUsNode", "MinMemoryCPU", "MinMemoryNode"),
        *("NodeList", "NumCPUs", "NumNodes", "NumTasks", "OverSubscribe", "Partition", "QOS", "ReqNodeList"),
        *("Reservation", "StartTime", "StdErr", "StdOut", "TimeMin", "TresPerNode", "UserID", "WorkDir"),
    )
}
Change = Callable[[Mesh, Job], Awaitable[Any]]


def main(words: Sequence[str]) -> int:
    """Run a command and return the exit code.

    Raises:
        SlurmError: it does not exist, or fails.
    """
    flags = [word for word in words if word in FLAGS]
    left = [word for word in words if word not in FLAGS]
    if not left or left[0] in ("help", "-h", "--help"):
        print(HELP)
        return 0
    name, *arguments = left
    found = next((command for known, command in COMMANDS.items() if len(name) > 1 and known.startswith(name)), None)
    if found is None:
        raise SlurmError(f"invalid keyword: {name}", prefixed=False)
    return found(arguments, any(flag in ("-o", "--oneliner") for flag in flags))


def _show(arguments: Sequence[str], oneliner: bool) -> int:
    entity, *names = [part for word in arguments for part in word.split("=", 1)] or [""]
    shown = {
        "jobs": _job_records, "nodes": _node_records, "partitions": lambda names: iter([_PARTITION]),
        "hostnames": None, "hostlist": None, "config": lambda names: iter(["ClusterName = cotenant"]),
    }  # fmt: skip
    found = next((known for known in shown if entity and known.startswith(entity.lower())), None)
    if found is None:
        raise SlurmError(f"invalid entity:{entity} for keyword:show", prefixed=False)
    if found in ("hostnames", "hostlist"):
        text = ",".join(names) or os.environ.get("SLURM_JOB_NODELIST", "")
        print("\n".join(expanded(text)) if found == "hostnames" else compressed(expanded(text)))
        return 0
    records = list((shown[found] or iter)(names))
    for record in records:
        print(" ".join(record.split()) if oneliner else f"{record}\n")
    return 0


_PARTITION = f"PartitionName={QUEUE}\n   AllocNodes=ALL Default=YES\n   MaxTime=UNLIMITED State=UP"


def _job_records(names: Sequence[str]) -> Iterator[str]:
    """Yield what is known of jobs: of the named ones, or of all that have not ended."""

    async def work(mesh: Mesh) -> list[Job]:
        if not names:
            return await list_jobs(mesh, JobFilter(phases=LIVE_PHASES), JOB_VIEW_FULL)
        failed = "slurm_load_jobs error: "
        ids = [job_id for name in names for job_id in read_ids(name)]
        return [job for job_id in ids for job in await find_one(mesh, job_id, failed, JOB_VIEW_FULL)]

    now = time.time()
    jobs = in_order(call(work))
    if not jobs:
        yield "No jobs in the system"
    for job in jobs:
        yield job_record(Facts(job, now))


def job_record(one: Facts) -> str:
    """Return what is known of a job, as `scontrol show job` prints it."""
    spec = one.spec
    array = f" ArrayJobId={one.array_number} ArrayTaskId={one.index}" if one.in_array else ""
    limit = times.write_elapsed(one.limit_seconds) if one.limit_seconds is not None else "UNLIMITED"
    output, error = _outputs(one)
    begun = [
        f"JobId={one.raw_id}{array} JobName={spec.name}",
        f"UserId={one.job.submitter}(N/A) GroupId=N/A(N/A) MCS_label=N/A",
        f"Priority={spec.priority} Nice=0 Account={spec.tenant} QOS=normal",
        f"JobState={one.state.name} Reason={one.reason} Dependency={one.dependency or NONE}",
        f"Requeue={int(spec.preemptible or not spec.HasField('preemptible'))} "
        f"Restarts={max(0, one.attempt.number - 1)} BatchFlag=1 Reboot=0 ExitCode={one.exit_code}",
        f"RunTime={times.write_elapsed(one.elapsed)} TimeLimit={limit} TimeMin=N/A",
        f"SubmitTime={times.write_time(one.submitted)} EligibleTime={times.write_time(one.submitted)}",
        f"StartTime={times.write_time(one.begin, times.UNKNOWN)} EndTime={times.write_time(one.end, times.UNKNOWN)} "
        "Deadline=N/A",
        f"Partition={spec.queue} AllocNode:Sid=N/A:N/A",
        f"NodeList={one.node_list or NONE}",
        f"BatchHost={one.nodes[0] if one.nodes else NONE}",
        f"NumNodes={one.node_count} NumCPUs={one.cpus} NumTasks={spec.environment.get('SLURM_NTASKS', '1')} "
        f"CPUs/Task={spec.environment.get('SLURM_CPUS_PER_TASK', '1')}",
        f"TRES={one.tres}",
        f"MinMemoryNode={sizes.write_megabytes(one.memory_bytes)} MinTmpDiskNode=0",
        f"Features={NONE} DelayBoot=00:00:00",
        f"Comment={one.comment}" if one.comment else "",
        f"Command={spec.name}",
        f"WorkDir={one.work_folder}",
        f"StdErr={error}",
        "StdIn=/dev/null",
        f"StdOut={output}",
        f"TresPerNode={one.gres}" if one.gpus else "",
    ]
    return "\n   ".join(filter(None, begun))


def _outputs(one: Facts) -> tuple[str, str]:
    """Return the files of a job's output and errors; "" for a job that `sbatch` did not submit."""
    environment, command = one.spec.environment, one.spec.command
    if "SLURM_JOB_USER" not in environment or len(command) < BATCH_ARGUMENTS:
        return "", ""
    values = {
        "A": one.array_number, "a": one.index or "4294967294", "j": one.raw_id, "J": one.raw_id,
        "N": one.nodes[0] if one.nodes else "%N", "n": "0", "s": "batch", "t": "0",
        "u": environment["SLURM_JOB_USER"], "x": one.spec.name,
    }  # fmt: skip
    output, error = (
        os.path.join(one.work_folder, patterns.expand(pattern, values)) if pattern else "" for pattern in command[4:6]
    )
    return output, error or output


def _node_records(names: Sequence[str]) -> Iterator[str]:
    nodes = call(list_nodes)
    known = {node.id: node for node in nodes}
    for name in [one for text in names for one in expanded(text)] or list(known):
        if name not in known:
            raise SlurmError(f"Node {name} not found", prefixed=False)
        yield node_record(known[name])


def node_record(node: Node) -> str:
    """Return what is known of a node, as `scontrol show node` prints it."""
    inventory = node.inventory
    memory, used = inventory.memory_bytes >> 20, node.used_memory_bytes >> 20
    gpus, cores = len(inventory.gpus), len(inventory.cores)
    parts = [
        f"NodeName={node.id} Arch=N/A CoresPerSocket={cores}",
        f"CPUAlloc={node.used_cores} CPUTot={cores} CPULoad=N/A",
        f"Gres={f'gpu:{gpus}' if gpus else NONE}",
        f"NodeAddr={inventory.address} NodeHostName={node.id} Version={inventory.agent_version}",
        f"RealMemory={memory} AllocMem={used} FreeMem={memory - used} Sockets=1 Boards=1",
        f"State={state_of_node(node).upper()} ThreadsPerCore=1 TmpDisk={inventory.scratch_bytes >> 20} Weight=1",
        f"Partitions={QUEUE}",
        f"CfgTRES=cpu={cores},mem={memory}M,gres/gpu={gpus}",
        f"AllocTRES=cpu={node.used_cores},mem={used}M,gres/gpu={node.used_gpu_milli // 1000}",
        f"Reason={node.state_reason}" if node.state_reason else "",
    ]
    return "\n   ".join(filter(None, parts))


def _changing(change: Change, failed: str) -> Callable[[Sequence[str], bool], int]:
    """Return the command that changes the jobs and tasks that its arguments name."""

    def command(arguments: Sequence[str], oneliner: bool) -> int:
        ids = [job_id for text in arguments for job_id in read_ids(text.removeprefix("jobid="))]
        if not ids:
            raise SlurmError(f"too few arguments for keyword:{failed}", prefixed=False)

        async def work(mesh: Mesh) -> None:
            for job_id in ids:
                for job in await find_one(mesh, job_id, "", JOB_VIEW_FULL):
                    await change(mesh, job)

        _call(work, f"{failed}: ")
        return 0

    return command


def _call(work: Callable[[Mesh], Awaitable[None]], failed: str) -> None:
    try:
        call(work)
    except CommandError as error:
        raise of_mesh(error, failed) from None


async def _hold(mesh: Mesh, job: Job) -> None:
    if job.phase != JOB_PHASE_QUEUED:
        raise SlurmError(f"Job {Facts(job, 0.0).job_id} is not pending", prefixed=False)
    await mesh.jobs.SuspendJob(SuspendJobRequest(id=job.id))


async def _suspend(mesh: Mesh, job: Job) -> None:
    await mesh.jobs.SuspendJob(SuspendJobRequest(id=job.id))


async def _resume(mesh: Mesh, job: Job) -> None:
    await mesh.jobs.ResumeJob(ResumeJobRequest(id=job.id))


async def _requeue(mesh: Mesh, job: Job) -> None:
    """Stop a running job and queue it again; it may return to its nodes at once."""
    if job.phase != JOB_PHASE_RUNNING:
        raise SlurmError(f"Job {Facts(job, 0.0).job_id} does not run, and cannot be requeued", prefixed=False)
    request = MoveJobRequest(id=job.id, number=job.attempt.number, reason="requeued by scontrol")
    request.avoid.SetInParent()
    await mesh.jobs.MoveJob(request)


def _update(arguments: Sequence[str], oneliner: bool) -> int:
    """Change fields of a job."""
    pairs = dict(pair.partition("=")[::2] for pair in arguments)
    given = {name.lower(): value for name, value in pairs.items()}
    job_text = given.pop("jobid", given.pop("job", ""))
    if not job_text:
        raise SlurmError("No valid entity in update command", prefixed=False)
    spec, paths = _changes(given)

    async def work(mesh: Mesh) -> None:
        for job_id in read_ids(job_text):
            for job in await find_one(mesh, job_id, "slurm_update error: "):
                request = UpdateJobRequest(job=Job(id=job.id, spec=spec))
                request.update_mask.paths.extend(paths)
                if "timelimit" in given:
                    request.job.spec.ClearField("time_limit")
                    if (limit := _new_limit(given["timelimit"], Facts(job, 0.0))) is not None:
                        request.job.spec.time_limit.CopyFrom(duration(limit))
                if "spec.labels" in paths:
                    request.job.spec.labels.update({**job.spec.labels, **spec.labels})
                await mesh.jobs.UpdateJob(request)

    _call(work, "slurm_update error: ")
    return 0


def _changes(given: Mapping[str, str]) -> tuple[JobSpec, list[str]]:
    """Return the new values of fields, and their paths.

    Raises:
        SlurmError: names every field that cannot be changed, or does not exist.
    """
    spec, paths = JobSpec(), list[str]()
    unknown = [name for name in given if name not in FIXED_FIELDS and name not in CHANGEABLE]
    if unknown:
        wrong = [f"Update of this parameter is not supported: {name}={given[name]}" for name in unknown]
        raise SlurmError(*wrong, "Request aborted", prefixed=False)
    if fixed := [FIXED_FIELDS[name] for name in given if name in FIXED_FIELDS]:
        why = ", ".join(fixed)
        raise SlurmError(
            f"slurm_update error: {FIXED}: {why} of a submitted job cannot be changed",
            "hint: cancel it, and submit it again with other options",
            prefixed=False,
        )
    for name, value in given.items():
        try:
            _change(spec, paths, name, value)
        except ValueError:
            raise SlurmError(f'Invalid {name} value "{value}"', prefixed=False) from None
    return spec, paths


def _new_limit(text: str, job: Facts) -> float | None:
    """Return a job's new time limit in seconds, its grace included; None for no limit. A sign changes the present one.

    Raises:
        SlurmError: the job has no limit, or one that is too short to be changed so.
    """
    sign, value = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    limit: float | None = times.read_limit(value)
    if limit is None or not sign:
        return None if limit is None else limit + job.limit_grace_seconds
    limit = (job.limit_seconds or 0.0) + (limit if sign == "+" else -limit)
    if job.limit_seconds is None or limit <= 0:
        present = times.write_elapsed(job.limit_seconds) if job.limit_seconds else "UNLIMITED"
        raise SlurmError(f"Invalid TimeLimit value: the present limit is {present}", prefixed=False)
    return limit + job.limit_grace_seconds


def _change(spec: JobSpec, paths: list[str], name: str, value: str) -> None:
    if name in ("priority", "nice"):
        spec.priority = -int(value) if name == "nice" else int(value)
        paths.append("spec.priority")
    elif name == "timelimit":
        times.read_limit(value.removeprefix("+").removeprefix("-"))
        paths.append("spec.time_limit")
    elif name == "comment":
        spec.labels["comment"] = value
        paths.append("spec.labels")
    elif name == "requeue":
        spec.preemptible = bool(int(value))
        paths.append("spec.preemptible")
    else:
        spec.name = value
        paths.append("spec.name")


def _ping(arguments: Sequence[str], oneliner: bool) -> int:
    try:
        call(list_nodes)
    except CommandError:
        print("Slurmctld(primary) at cotenant is DOWN")
        return FAILED
    print("Slurmctld(primary) at cotenant is UP")
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str], bool], int]] = {
    "show": _show,
    "hold": _changing(_hold, "hold"),
    "uhold": _changing(_hold, "uhold"),
    "release": _changing(_resume, "release"),
    "suspend": _changing(_suspend, "suspend"),
    "resume": _changing(_resume, "resume"),
    "requeue": _changing(_requeue, "requeue"),
    "update": _update,
    "ping": _ping,
}
