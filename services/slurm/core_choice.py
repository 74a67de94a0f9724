"""How many CPUs to give GPU jobs of Slurm at submission, from how long earlier runs of the same job took. Pure.

Theory of operation. Users submit the same job again and again. Jobs with the same user, partition, name and number of
GPUs are one kind, and 1 / run time is its rate. The core search of `core.sizing`, which finds the fewest cores at full
speed of running jobs, works as well from one run to the next: each submission gets the cores of the next trial until
they are found. A kind whose runs differ on equally many cores does different work each time, so nothing can be learned
from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.core.model.refusal import plural
from cotenant.core.prediction.core_curve import Point, Windows
from cotenant.core.sizing.core_search import SearchOptions, next_trial
from cotenant.services.slurm.records import Picture, SlurmJob, SlurmNode

KINDS_MAX = 5_000  # the least recently seen are dropped
RUNS_KEPT, COUNTS_KEPT = 8, 16
RUNS_MIN = 2  # before the first trial
SECONDS_MIN = 5.0  # Slurm's times are whole seconds; shorter runs say nothing of a rate [R]
SPREAD_MAX = 0.25  # of rates on equally many cores, relative; with more, the runs do different work [R]
SEARCH = SearchOptions(tolerance=0.05, noise=0.08, step=1)  # run times of whole seconds are noisier than windows [R]
LIMIT_FACTOR = 1.5  # a time limit must leave this much room before a job gets fewer cores
GENERIC_NAMES = frozenset({"", "wrap", "sbatch", "bash", "sh", "python", "interactive", "job.sh", "submit.sh"})
LINE_MAX = 400
FOUND = "more cores gain less"  # in the reason of a finished search


@dataclass(frozen=True, slots=True, order=True)
class JobKind:
    """Jobs that are expected to do the same work: one user, partition, number of GPUs and name."""

    user_id: int
    partition: str
    gpus: int
    name: str

    @property
    def sayable(self) -> bool:
        """Whether it can stand in a line of the table."""
        return self.name.isprintable() and self.partition.isprintable() and len(self.name + self.partition) <= LINE_MAX


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """The CPUs that the next job of a kind gets.

    `default_cpus` is what Slurm gives if its user names none. A job that would get fewer than it asked for must have a
    time limit of at least `limit_seconds_min`, or none.
    """

    kind: JobKind
    cpus: int
    default_cpus: int
    limit_seconds_min: float
    found: bool
    reason: str

    def __str__(self) -> str:
        """Return it in one line."""
        kind = self.kind
        what = f"{kind.name!r} of uid {kind.user_id} in {kind.partition} with {plural(kind.gpus, 'GPU')}"
        return f"{what}: {plural(self.cpus, 'CPU')} ({self.reason})"


def kind_of(job: SlurmJob) -> JobKind | None:
    """Return the kind of a job whose cores are chosen; None for any other.

    These have GPUs, one node and one task, and a name that says what they do.

    >>> kind_of(SlurmJob("17", 17, name="train", user_id=1000, partitions=("main",), gpus_total=2))
    JobKind(user_id=1000, partition='main', gpus=2, name='train')
    >>> kind_of(SlurmJob("17", 17, name="wrap", user_id=1000, partitions=("main",), gpus_total=2))
    """
    if not job.gpus_total or job.name in GENERIC_NAMES or len(job.partitions) != 1 or job.user_id is None:
        return None
    if job.het or job.exclusive or job.reservation or job.nodes_min > 1 or job.processes > 1:
        return None
    kind = JobKind(job.user_id, job.partitions[0], job.gpus_total, job.name)
    return kind if kind.sayable else None


def cpus_max(kind: JobKind, picture: Picture, cpus_per_gpu_max: int | None) -> int:
    """Return the most CPUs that a kind may get: its share of any node that can hold it, or what is allowed per GPU.

    Every node of the partition with enough GPUs can then hold it, so that no submission becomes impossible.
    """
    nodes = [node for node in picture.nodes.values() if node.gpus >= kind.gpus and kind.partition in node.partitions]
    if not nodes:
        return 0
    shares = [node.cores * node.threads for node in nodes]
    per_gpu = [_per_gpu(node, cpus_per_gpu_max) * kind.gpus for node in nodes]
    return min(min(shares), min(per_gpu))


def _per_gpu(node: SlurmNode, cpus_per_gpu_max: int | None) -> int:
    return cpus_per_gpu_max or max(1, node.cores // node.gpus) * node.threads


class RunHistory:
    """The latest run times of each kind of job by its cores."""

    def __init__(self) -> None:
        self._kinds: dict[JobKind, Windows] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, job: SlurmJob, picture: Picture) -> bool:
        """Learn from a job that ended; return whether something was learned.

        Jobs that failed, were suspended, or were so short that whole seconds say nothing are left out.
        """
        kind, seconds = kind_of(job), job.ran_seconds(job.ended_seconds)
        if kind is None or job.state != "COMPLETED" or job.suspended_seconds or seconds < SECONDS_MIN or not job.cpus:
            return False
        self._add(kind, -(-job.cpus // _threads(kind, picture)), 1.0 / seconds)
        return True

    def _add(self, kind: JobKind, cores: int, rate: float) -> None:
        windows = self._kinds.pop(kind, None) or Windows(rates_max=RUNS_KEPT, counts_max=COUNTS_KEPT)
        windows.add(cores, rate)
        self._kinds[kind] = windows  # the latest come last
        if len(self._kinds) > KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]

    def expected_seconds(self, job: SlurmJob, picture: Picture) -> float | None:
        """Return how long a job will run on its cores, by earlier runs of its kind on any; None if nothing is known."""
        kind = kind_of(job)
        windows = self._kinds.get(kind) if kind else None
        if kind is None or windows is None or not job.cpus:
            return None
        return seconds_at(windows.points(), -(-job.cpus // _threads(kind, picture)))

    def choices(
        self, picture: Picture, cpus_per_gpu_max: int | None = None, defaults: Mapping[str, int] | None = None
    ) -> list[CoreChoice]:
        """Return the CPUs of the next job of each kind of which something is known, sorted.

        Args:
            picture: The cluster, for the sizes of its nodes.
            cpus_per_gpu_max: The most CPUs for each GPU; by default a GPU's share of its node.
            defaults: By partition, the CPUs per GPU that Slurm gives if a user names none (DefCpuPerGPU).
        """
        found = []
        for kind, windows in self._kinds.items():
            default = max(1, (defaults or {}).get(kind.partition, 0) * kind.gpus)
            choice = _choice(kind, windows.points(), picture, cpus_max(kind, picture, cpus_per_gpu_max), default)
            if choice:
                found.append(choice)
        return sorted(found, key=lambda choice: choice.kind)

    def dump(self) -> str:
        """Return it as JSON."""
        kinds = [
            [kind.user_id, kind.partition, kind.gpus, kind.name, {str(c): list(r) for c, r in windows.rates.items()}]
            for kind, windows in self._kinds.items()
        ]
        return json.dumps({"version": 1, "kinds": kinds})

    @classmethod
    def load(cls, text: str | bytes) -> RunHistory:
        """Return a dumped history, without what in it is invalid.

        Raises:
            ValueError: it is no dump.
        """
        try:
            dumped = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(dumped, dict) or dumped.get("version") != 1 or not isinstance(dumped.get("kinds"), list):
            raise ValueError("it has no version or no kinds of jobs")
        history = cls()
        for entry in dumped["kinds"][-KINDS_MAX:]:
            for kind, cores, rate in _entry(entry):
                history._add(kind, cores, rate)
        return history


def _entry(entry: Any) -> Iterable[tuple[JobKind, int, float]]:
    """Yield what is valid of one kind of a dump."""
    if not isinstance(entry, list) or [type(one) for one in entry] != [int, str, int, str, dict]:
        return
    user_id, partition, gpus, name, rates = entry
    kind = JobKind(user_id, partition, gpus, name)
    for cores, seen in rates.items():
        if kind.sayable and cores.isdecimal() and 0 < len(cores) <= 5 and int(cores) and isinstance(seen, list):
            yield from ((kind, int(cores), rate) for rate in seen if isinstance(rate, float) and 0 < rate < 1)


def _threads(kind: JobKind, picture: Picture) -> int:
    """Return the CPUs of a core on the nodes of a kind."""
    return max((n.threads for n in picture.nodes.values() if kind.partition in n.partitions and n.gpus), default=1)


def _choice(kind: JobKind, points: Sequence[Point], picture: Picture, most: int, default: int) -> CoreChoice | None:
    threads = _threads(kind, picture)
    runs = sum(point.windows for point in points)
    if most < threads or runs < RUNS_MIN or max(point.spread for point in points) > SPREAD_MAX:
        return None
    trial = next_trial(points, points[0].cores, most // threads, SEARCH)
    slowest = max(seconds_at(points, trial.cores), 0.0)
    reason = f"{trial.reason}; {plural(runs, 'run')} on {_counts(points)}"
    limit = LIMIT_FACTOR * slowest
    return CoreChoice(kind, trial.cores * threads, default, limit, trial.found, reason)


def seconds_at(points: Sequence[Point], cores: int) -> float:
    """Return how long a run on some cores may take: as measured on as many or the next fewer, else in proportion.

    >>> seconds_at([Point(2, 0.1), Point(4, 0.2)], 3), seconds_at([Point(2, 0.1), Point(4, 0.2)], 1)
    (10.0, 20.0)
    """
    below = [point for point in points if point.cores <= cores]
    if below:
        return 1 / below[-1].rate
    return points[0].cores / cores / points[0].rate


def _counts(points: Sequence[Point]) -> str:
    counts = [str(point.cores) for point in points]
    listed = counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} and {counts[-1]}"
    return f"{listed} {'core' if counts == ['1'] else 'cores'}"


# The table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableRules:
    """What the script in slurmctld may do.

    `explicit`: also change jobs whose users named a number of CPUs. `with_memory`: change only jobs that name their
    memory per node, because Slurm else derives it from their CPUs. `dry_run`: only log.
    """

    explicit: bool = False
    with_memory: bool = False
    dry_run: bool = False


TABLE_MARK = "cotenant-cores"
TABLE_VERSION = 1
TABLE_BYTES_MAX = 1024 * 1024  # the script reads no more
VALID_SECONDS = 600


def table_text(choices: Sequence[CoreChoice], rules: TableRules, now: float, valid_seconds: int = VALID_SECONDS) -> str:
    """Return the table that the script in slurmctld reads: a header, a line for each kind of job, and `end`.

    >>> kind = JobKind(1000, "main", 2, "train")
    >>> print(table_text([CoreChoice(kind, 6, 1, 90.0, True, "6 cores")], TableRules(), 1e9).replace("\\t", " "))
    cotenant-cores 1 1000000000 600 0 0 0
    1000 main 2 train 6 1 90 6 cores
    end
    <BLANKLINE>
    """
    flags = (rules.explicit, rules.with_memory, rules.dry_run)
    header = (TABLE_MARK, TABLE_VERSION, int(now), valid_seconds, *map(int, flags))
    size = 100
    lines = ["\t".join(map(str, header))]
    for choice in choices:
        kind = choice.kind
        named = (kind.user_id, kind.partition, kind.gpus, kind.name)
        line = "\t".join(map(str, (*named, choice.cpus, choice.default_cpus, int(choice.limit_seconds_min))))
        line += f"\t{choice.reason[:LINE_MAX]}"
        size += len(line.encode()) + 1
        if size > TABLE_BYTES_MAX:
            break
        lines.append(line)
    return "\n".join((*lines, "end", ""))


def found_cpus(text: str, now: float) -> dict[JobKind, int]:
    """Return the CPUs of the kinds in a table of which the search is over; nothing of an invalid or old table.

    >>> choice = CoreChoice(JobKind(1000, "main", 2, "train"), 6, 1, 90.0, True, "6 cores: more cores gain less")
    >>> found_cpus(table_text([choice], TableRules(), 1e9), 1e9)
    {JobKind(user_id=1000, partition='main', gpus=2, name='train'): 6}
    """
    lines = [line.split("\t") for line in text.splitlines()]
    if len(lines) < 2 or lines[0][:2] != [TABLE_MARK, str(TABLE_VERSION)] or lines[-1] != ["end"]:
        return {}
    header = lines[0][2:4]
    if not all(map(_is_count, header)) or not 0 <= now - int(header[0]) + 60 <= int(header[1]) + 60:
        return {}
    found = {}
    for row in lines[1:-1]:
        if len(row) == 8 and all(_is_count(row[place]) for place in (0, 2, 4)) and FOUND in row[7]:
            found[JobKind(int(row[0]), row[1], int(row[2]), row[3])] = int(row[4])
    return found


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def kind_in(variables: Mapping[str, str]) -> JobKind | None:
    """Return the kind of a running job by the variables that Slurm sets in it; None if it has GPUs on several nodes.

    >>> kind_in({"SLURM_JOB_UID": "1000", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NUM_NODES": "1"})
    JobKind(user_id=1000, partition='', gpus=2, name='')
    """
    user, gpus = variables.get("SLURM_JOB_UID", ""), variables.get("SLURM_GPUS_ON_NODE", "")
    if not (_is_count(user) and _is_count(gpus)) or variables.get("SLURM_JOB_NUM_NODES") != "1":
        return None
    return JobKind(int(user), variables.get("SLURM_JOB_PARTITION", ""), int(gpus), variables.get("SLURM_JOB_NAME", ""))
