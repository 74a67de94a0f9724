"""`squeue`: lists jobs that have not ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from cotenant.cli.connection import Mesh
from cotenant.cli.slurm import sizes, times
from cotenant.cli.slurm.arguments import read
from cotenant.cli.slurm.facts import NONE, Facts, folded
from cotenant.cli.slurm.finding import call, find_each, in_order, list_jobs
from cotenant.cli.slurm.job_ids import INVALID, read_ids
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.cli.slurm.states import LIVE_PHASES, State, read_states
from cotenant.cli.slurm.table import Cell, Column, lines, read_format, read_long_format
from cotenant.cli.slurm.users import user_name
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JobFilter

NAME = "squeue"
FORMAT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
FORMAT_LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
FORMAT_START = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %20Y %R"
OPTIONS = {
    "h": "noheader", "noheader": "noheader", "u": "user=", "user": "user=", "users": "user=", "me": "me",
    "j": "jobs=", "jobs": "jobs=", "job": "jobs=", "t": "states=", "states": "states=", "state": "states=",
    "o": "format=", "format": "format=", "O": "Format=", "Format": "Format=", "n": "name=", "name": "name=",
    "p": "partition=", "partition": "partition=", "A": "account=", "account": "account=", "w": "nodelist=",
    "nodelist": "nodelist=", "r": "array", "array": "array", "l": "long", "long": "long", "start": "start",
    "json": "json", "a": "all", "all": "all", "S": "sort=", "sort": "sort=", "q": "qos=", "qos": "qos=", "help": "help",
    "i": "iterate=", "iterate": "iterate=", "M": "clusters=", "clusters": "clusters=", "v": "verbose",
    "noconvert": "noconvert",
}  # fmt: skip
HELP = """\
Usage: squeue [-h] [-u USER] [--me] [-j JOB,…] [-t STATE,…] [-o FORMAT] [-O FIELD,…] [--start] [--json]
Lists jobs of Cotenant. Formats have the letters {letters}."""
_Value = Callable[[Facts], str]
_COLUMNS: Sequence[tuple[str, str, str, _Value]] = (  # letter, names for -O, heading, value
    ("i", "jobarrayid", "JOBID", lambda one: one.job_id),
    ("A", "jobid", "JOBID", lambda one: one.raw_id),
    ("F", "arrayjobid", "ARRAY_JOB_ID", lambda one: one.array_number),
    ("K", "arraytaskid", "ARRAY_TASK_ID", lambda one: one.indices or one.index or times.NONE),
    ("j", "name", "NAME", lambda one: one.spec.name),
    ("u", "username", "USER", lambda one: one.job.submitter),
    ("T", "state", "STATE", lambda one: one.state.name),
    ("t", "statecompact", "ST", lambda one: one.state.code),
    ("P", "partition", "PARTITION", lambda one: one.spec.queue),
    ("M", "timeused", "TIME", lambda one: times.write_period(one.elapsed)),
    ("l", "timelimit", "TIME_LIMIT", lambda one: _limit(one.limit_seconds)),
    ("L", "timeleft", "TIME_LEFT", lambda one: _limit(one.limit_seconds and one.limit_seconds - one.elapsed)),
    ("D", "numnodes", "NODES", lambda one: str(one.node_count)),
    ("C", "numcpus", "CPUS", lambda one: str(one.cpus)),
    ("R", "reasonlist", "NODELIST(REASON)", lambda one: one.where),
    ("N", "nodelist", "NODELIST", lambda one: one.node_list),
    ("r", "reason", "REASON", lambda one: one.reason),
    ("b", "tres-per-node", "TRES_PER_NODE", lambda one: one.gres),
    ("m", "minmemory", "MIN_MEMORY", lambda one: sizes.write_megabytes(one.memory_bytes)),
    ("S", "starttime", "START_TIME", lambda one: times.write_time(one.begin)),
    ("e", "endtime", "END_TIME", lambda one: times.write_time(one.end)),
    ("V", "submittime", "SUBMIT_TIME", lambda one: times.write_time(one.submitted)),
    ("a", "account", "ACCOUNT", lambda one: one.spec.tenant),
    ("q", "qos", "QOS", lambda one: "normal"),
    ("Q", "prioritylong", "PRIORITY", lambda one: str(one.spec.priority)),
    ("p", "priority", "PRIORITY", lambda one: f"{one.spec.priority:.14f}"),
    ("k", "comment", "COMMENT", lambda one: one.comment or NONE),
    ("Z", "workdir", "WORK_DIR", lambda one: one.work_folder),
    ("o", "command", "COMMAND", lambda one: one.spec.name),
    ("E", "dependency", "DEPENDENCY", lambda one: one.dependency or NONE),
    ("B", "batchhost", "EXEC_HOST", lambda one: one.nodes[0] if one.nodes else "n/a"),
    ("Y", "schednodes", "SCHEDNODES", lambda one: NONE),
    ("h", "oversubscribe", "OVER_SUBSCRIBE", lambda one: "OK"),
    ("f", "feature", "FEATURES", lambda one: NONE),
    ("c", "mincpus", "MIN_CPUS", lambda one: "1"),
    ("U", "userid", "UID", lambda one: one.job.submitter),
    ("y", "nice", "NICE", lambda one: "0"),
)
_IDS = frozenset("iAFK")
LETTERS = {letter: Column(heading, value, letter in _IDS) for letter, _, heading, value in _COLUMNS}
NAMES: Mapping[str, Column[Facts]] = {name.replace("-", ""): LETTERS[letter] for letter, name, _, _ in _COLUMNS} | {
    "gres": LETTERS["b"]
}


def main(words: Sequence[str]) -> int:
    """List jobs and return the exit code.

    Raises:
        SlurmError: an option is invalid, or the only job that is asked for does not exist.
    """
    given, others = read(NAME, words, OPTIONS)
    if "help" in given:
        print(HELP.format(letters=" ".join(f"%{letter} ({column.heading})" for letter, column in LETTERS.items())))
        return 0
    if others:
        raise SlurmError(f"Unrecognized argument: {others[0]}")
    cells = _cells(given)
    states = read_states(given["states"]) if "states" in given else frozenset()
    wanted_ids = list(read_ids(given["jobs"])) if given.get("jobs") else []
    jobs = call(lambda mesh: _find(mesh, given, states, wanted_ids))
    now = time.time()
    found = [one for one in _in_states(jobs, states, now) if _matches(one, given)]
    kept = [one.job for one in found]
    rows = [Facts(job, now) for job in kept] if "array" in given else folded(kept, now)
    if "json" in given:
        from cotenant.cli.slurm.json_output import print_jobs

        print_jobs([Facts(job, now) for job in kept])
        return 0
    for line in lines(cells, rows, heading="noheader" not in given):
        print(line.rstrip() if "format" not in given else line)
    return 0


def _cells(given: Mapping[str, str]) -> list[Cell[Facts]]:
    if "Format" in given:
        return read_long_format(given["Format"], NAMES, "job")
    text = FORMAT_LONG if "long" in given else FORMAT_START if "start" in given else FORMAT
    return read_format(given.get("format") or os.environ.get("SQUEUE_FORMAT") or text, LETTERS, "job")


async def _find(
    mesh: Mesh, given: Mapping[str, str], states: frozenset[State] | None, wanted_ids: Sequence[str]
) -> list[Job]:
    own = "me" in given or given.get("user") == user_name()
    if wanted_ids:
        by_id = await find_each(mesh, wanted_ids)
        jobs = [job for found in by_id.values() for job in found]
        if not jobs and len(wanted_ids) == 1:
            raise SlurmError(f"slurm_load_jobs error: {INVALID}", prefixed=False)
        return in_order(jobs)
    wanted = JobFilter(own_only=own, phases=LIVE_PHASES if states == frozenset() else ())
    if given.get("account") and "," not in given["account"]:
        wanted.tenant = given["account"]
    return in_order(await list_jobs(mesh, wanted))


def _in_states(jobs: Sequence[Job], states: frozenset[State] | None, now: float) -> list[Facts]:
    """Return what is known of the jobs in the given states; without any, of those that have not ended."""
    found = [Facts(job, now) for job in jobs]
    if states is None:
        return found
    return [one for one in found if one.state in states or (not states and one.job.phase in LIVE_PHASES)]


def _matches(one: Facts, given: Mapping[str, str]) -> bool:
    """Return whether the options select a job."""
    own = user_name()
    users = [name for name in given.get("user", "").split(",") if name]
    return (
        (not users or users == [own] or one.job.submitter in users)
        and ("name" not in given or one.spec.name in given["name"].split(","))
        and ("account" not in given or one.spec.tenant in given["account"].split(","))
        and ("partition" not in given or one.spec.queue in given["partition"].split(","))
        and ("nodelist" not in given or not set(one.nodes).isdisjoint(given["nodelist"].split(",")))
    )


def _limit(seconds: float | None) -> str:
    return "UNLIMITED" if seconds is None else times.write_period(seconds)
