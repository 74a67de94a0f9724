"""What Slurm's commands show of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotenant.cli.slurm import sizes, times
from cotenant.cli.slurm.conventions import COMMENT, KILL_WAIT_SECONDS, TERMINATE
from cotenant.cli.slurm.job_ids import shown_id
from cotenant.cli.slurm.nodes import compressed
from cotenant.cli.slurm.states import ENDED_PHASES, PENDING, reason_of, state_of
from cotenant.codec.times import seconds
from cotenant.core.model.job_number import SEPARATOR, number_of
from cotenant.v1 import job_pb2 as pb

NONE = "(null)"


class Facts:
    """A job, or the waiting tasks of an array together, as Slurm sees it."""

    def __init__(self, job: pb.Job, now: float, indices: str = "") -> None:
        self.job, self.spec, self.attempt, self.now, self.indices = job, job.spec, job.attempt, now, indices
        self.state, self.reason = state_of(job), reason_of(job)
        self.array_id, separator, self.index = job.id.partition(SEPARATOR)
        self.in_array = bool(separator)

    @property
    def job_id(self) -> str:
        """Its id as Slurm shows it."""
        return f"{number_of(self.array_id)}_[{self.indices}]" if self.indices else shown_id(self.job)

    @property
    def raw_id(self) -> str:
        """Its number."""
        return str(number_of(self.array_id if self.indices else self.job.id))

    @property
    def array_number(self) -> str:
        """The number of its array, or its own."""
        return str(number_of(self.array_id))

    @property
    def nodes(self) -> list[str]:
        """The nodes that it runs or last ran on."""
        return [] if self.state is PENDING else [one.node_id for one in self.attempt.allocations]

    @property
    def node_list(self) -> str:
        """Those nodes as a list."""
        return compressed(self.nodes)

    @property
    def node_count(self) -> int:
        """The number of its nodes."""
        return len(self.nodes) or max(1, self.spec.spread.min)

    @property
    def cpus(self) -> int:
        """The cores that it holds or asks for."""
        held = sum(len(task.core_ids) for one in self.attempt.allocations for task in one.tasks)
        asked = sum(role.replicas * max(1, role.resources.cores) for role in self.spec.roles)
        return held if held and self.state is not PENDING else max(1, asked)

    @property
    def gpus_per_node(self) -> int:
        """The GPUs that it asks for on each of its nodes."""
        return -(-self.gpus // self.node_count)

    @property
    def gpus(self) -> int:
        """All GPUs that it asks for."""
        return sum(role.replicas * -(-role.resources.gpu_milli // 1000) for role in self.spec.roles)

    @property
    def gres(self) -> str:
        """Its GPUs on each node, as a generic resource."""
        gpu_type = next((role.resources.gpu_type for role in self.spec.roles if role.resources.gpu_type), "")
        count = self.gpus_per_node
        return f"gres/gpu:{f'{gpu_type}:' if gpu_type else ''}{count}" if count else times.NONE

    @property
    def memory_bytes(self) -> int:
        """The memory that it asks for on each node."""
        return max((role.resources.memory_bytes for role in self.spec.roles), default=0)

    @property
    def tres(self) -> str:
        """Its resources as accounting names them."""
        memory = self.memory_bytes * self.node_count
        parts = [f"billing={self.cpus}", f"cpu={self.cpus}"]
        parts += [f"gres/gpu={self.gpus}"] if self.gpus else []
        parts += [f"mem={sizes.write_megabytes(memory)}"] if memory else []
        return ",".join([*parts, f"node={self.node_count}"])

    @property
    def limit_seconds(self) -> float | None:
        """Its time limit; None if it has none."""
        if not self.spec.HasField("time_limit"):
            return None
        total = seconds(self.spec.time_limit) - self.limit_grace_seconds
        return math.ceil(total / times.MINUTE) * times.MINUTE

    @property
    def limit_grace_seconds(self) -> float:
        """The part of its limit that Slurm does not count: between the warning at the limit and the kill."""
        warned = seconds(self.spec.grace) if self.spec.warning_signal in ("", TERMINATE) else 0.0
        return min(warned, KILL_WAIT_SECONDS)

    @property
    def start(self) -> float | None:
        """When its last attempt started."""
        if self.state is PENDING or not self.attempt.HasField("start_time"):
            return None
        return seconds(self.attempt.start_time)

    @property
    def end(self) -> float | None:
        """When it ended, or will have reached its time limit."""
        if self.job.HasField("end_time"):
            return seconds(self.job.end_time)
        limit = self.limit_seconds
        return None if self.start is None or limit is None else self.start + limit

    @property
    def submitted(self) -> float:
        """When it was submitted."""
        return seconds(self.job.create_time)

    @property
    def elapsed(self) -> float:
        """How long its last attempt has run."""
        if self.start is None:
            return 0.0
        ended = self.job.phase in ENDED_PHASES and self.end is not None
        stopped = seconds(self.attempt.end_time) if self.attempt.HasField("end_time") else None
        until = stopped if stopped is not None else self.end if ended and self.end is not None else self.now
        return max(0.0, until - self.start)

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of its last attempt, known once that has ended."""
        return seconds(self.attempt.cpu_time)

    @property
    def system_seconds(self) -> float:
        """The part of that which the kernel used."""
        return min(seconds(self.attempt.system_time), self.cpu_seconds)

    @property
    def memory_peak(self) -> str:
        """The peak memory of its last attempt on a node, as `sacct` writes it; "" if it is unknown."""
        used = self.attempt.memory_peak_bytes
        return f"{-(-used // 1024)}K" if used else ""

    @property
    def exit_code(self) -> str:
        """The exit code and the signal of its last attempt."""
        if self.job.phase not in ENDED_PHASES or not self.attempt.HasField("exit"):
            return "0:0"
        return f"{self.attempt.exit.code}:{self.attempt.exit.signal}"

    @property
    def where(self) -> str:
        """Its nodes, or why it has none."""
        return f"({self.reason})" if not self.node_list or self.state is PENDING else self.node_list

    @property
    def dependency(self) -> str:
        """The jobs that it waits for."""
        words = {
            pb.DEPENDENCY_CONDITION_AFTER: "afterany",
            pb.DEPENDENCY_CONDITION_AFTER_FAIL: "afternotok",
            pb.DEPENDENCY_CONDITION_AFTER_STARTED: "after",
        }
        return ",".join(
            f"{words.get(one.condition, 'afterok')}:{_number_text(one.id)}" for one in self.spec.dependencies
        )

    @property
    def comment(self) -> str:
        """Its comment."""
        return str(self.spec.labels[COMMENT]) if COMMENT in self.spec.labels else ""

    @property
    def work_folder(self) -> str:
        """The folder that it starts in."""
        return str(self.spec.working_directory or self.spec.submit_directory.path)

    @property
    def begin(self) -> float | None:
        """When it starts, started or may start at the earliest; None if nobody knows."""
        if self.state is PENDING and self.spec.HasField("begin_time"):
            return seconds(self.spec.begin_time)
        return self.start


def _number_text(job_id: str) -> str:
    head, separator, index = job_id.partition(SEPARATOR)
    try:
        return f"{number_of(head)}{separator}{index}"
    except ValueError:
        return job_id


def folded(jobs: Sequence[pb.Job], now: float) -> list[Facts]:
    """Return what is known of jobs; the waiting tasks of an array with the same reason are one line.

    `Facts.indices` of such a line are the indices and the limit of the array.
    """
    found: list[Facts] = []
    waiting: dict[tuple[str, str], list[Facts]] = {}
    for job in jobs:
        facts = Facts(job, now)
        if not facts.in_array or facts.state is not PENDING:
            found.append(facts)
            continue
        key = (
            facts.array_id,
            "" if facts.reason in ("JobArrayTaskLimit", "Resources", "Priority", "None") else facts.reason,
        )
        if key not in waiting:
            waiting[key] = []
            found.append(facts)
        waiting[key].append(facts)
    if not waiting:
        return found
    from cotenant.core.model.job_array import from_indices  # few lists have waiting arrays

    leaders = {id(tasks[0]): tasks for tasks in waiting.values()}
    result = []
    for facts in found:
        if tasks := leaders.get(id(facts)):
            ranges = from_indices([int(one.index) for one in tasks], facts.spec.array_task.running_max)
            facts = Facts(facts.job, now, str(ranges))
        result.append(facts)
    return result
