"""`sacct`: lists jobs that have ended, and others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cotenant.cli.connection import Mesh
from cotenant.cli.slurm import sizes, times
from cotenant.cli.slurm.arguments import read
from cotenant.cli.slurm.facts import Facts
from cotenant.cli.slurm.finding import call, find_each, in_order, list_jobs
from cotenant.cli.slurm.job_ids import read_ids
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.cli.slurm.states import read_states
from cotenant.cli.slurm.users import user_name
from cotenant.codec.times import timestamp
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JobFilter

NAME = "sacct"
FORMAT = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
OPTIONS = {
    "j": "jobs=", "jobs": "jobs=", "o": "format=", "format": "format=", "n": "noheader", "noheader": "noheader",
    "P": "parsable2", "parsable2": "parsable2", "p": "parsable", "parsable": "parsable", "X": "allocations",
    "allocations": "allocations", "delimiter": "delimiter=", "u": "user=", "user": "user=", "uid": "user=",
    "S": "starttime=", "starttime": "starttime=", "E": "endtime=", "endtime": "endtime=", "s": "state=",
    "state": "state=", "A": "accounts=", "accounts": "accounts=", "name": "name=", "a": "allusers",
    "allusers": "allusers", "b": "brief", "brief": "brief", "l": "long", "long": "long", "D": "duplicates",
    "duplicates": "duplicates", "e": "helpformat", "helpformat": "helpformat", "units": "units=", "array": "array",
    "noconvert": "noconvert", "truncate": "truncate", "T": "truncate", "help": "help", "v": "verbose",
    "L": "allclusters", "allclusters": "allclusters", "M": "clusters=", "clusters": "clusters=", "r": "partition=",
    "partition": "partition=", "N": "nodelist=", "nodelist": "nodelist=",
}  # fmt: skip
BRIEF = "JobID,State,ExitCode"
LONG = "JobID,JobIDRaw,JobName,Partition,AllocCPUS,AllocTRES,Elapsed,State,ExitCode,NodeList,ReqMem,Start,End"
BATCH = ".batch"


class Line(NamedTuple):
    """A line: of a job, or of its batch step."""

    one: Facts
    step: str = ""


class Field(NamedTuple):
    """A field: its width, negative to the right as in Slurm's formats, and its value; ids are never cut off."""

    name: str
    width: int
    value: Callable[[Line], str]


def _of_job(value: Callable[[Facts], str]) -> Callable[[Line], str]:
    return lambda line: "" if line.step else value(line.one)


def _state(line: Line) -> str:
    return line.one.state.name


_FIELDS = (
    Field("Account", 10, lambda line: line.one.spec.tenant),
    Field("AllocCPUS", 10, lambda line: str(line.one.cpus if line.one.start is not None else 0)),
    Field("AllocNodes", 10, lambda line: str(len(line.one.nodes))),
    Field("AllocTRES", 10, lambda line: line.one.tres if line.one.start is not None else ""),
    Field("Comment", 14, _of_job(lambda one: one.comment)),
    Field("CPUTime", 10, lambda line: times.write_elapsed(line.one.elapsed * line.one.cpus)),
    Field("CPUTimeRAW", 10, lambda line: str(int(line.one.elapsed * line.one.cpus))),
    Field("DerivedExitCode", 15, _of_job(lambda one: "0:0")),
    Field("Elapsed", 10, lambda line: times.write_elapsed(line.one.elapsed)),
    Field("ElapsedRaw", 10, lambda line: str(int(line.one.elapsed))),
    Field("Eligible", 19, _of_job(lambda one: times.write_time(one.submitted))),
    Field("End", 19, lambda line: times.write_time(line.one.end if _has_ended(line.one) else None, times.UNKNOWN)),
    Field("ExitCode", 8, lambda line: line.one.exit_code),
    Field("JobID", 12, lambda line: f"{line.one.job_id}{line.step}"),
    Field("JobIDRaw", 12, lambda line: f"{line.one.raw_id}{line.step}"),
    Field("JobName", 10, lambda line: line.step.removeprefix(".") or line.one.spec.name),
    Field("MaxRSS", 10, lambda line: line.one.memory_peak if line.step else ""),
    Field("NCPUS", 10, lambda line: str(line.one.cpus)),
    Field("NNodes", 8, lambda line: str(line.one.node_count)),
    Field("NTasks", 8, lambda line: "1" if line.step else ""),
    Field("NodeList", 15, lambda line: line.one.node_list or "None assigned"),
    Field("Partition", 10, _of_job(lambda one: one.spec.queue)),
    Field("Priority", 10, _of_job(lambda one: str(one.spec.priority))),
    Field("QOS", 10, _of_job(lambda one: "normal")),
    Field("Reason", 22, _of_job(lambda one: one.reason)),
    Field("ReqCPUS", 8, lambda line: str(line.one.cpus)),
    Field("ReqMem", 10, _of_job(lambda one: sizes.write_megabytes(one.memory_bytes))),
    Field("ReqTRES", 10, _of_job(lambda one: one.tres)),
    Field("Restarts", 8, _of_job(lambda one: str(max(0, one.attempt.number - 1)))),
    Field("Start", 19, lambda line: times.write_time(line.one.start, times.UNKNOWN)),
    Field("State", 10, _state),
    Field("Submit", 19, lambda line: times.write_time(line.one.submitted)),
    Field("SubmitLine", 20, _of_job(lambda one: "")),
    Field("Timelimit", 10, _of_job(lambda one: _limit(one.limit_seconds))),
    Field("SystemCPU", 10, lambda line: times.write_cpu(line.one.system_seconds)),
    Field("TotalCPU", 10, lambda line: times.write_cpu(line.one.cpu_seconds)),
    Field("UID", 6, _of_job(lambda one: one.job.submitter)),
    Field("User", 9, _of_job(lambda one: one.job.submitter)),
    Field("UserCPU", 10, lambda line: times.write_cpu(line.one.cpu_seconds - line.one.system_seconds)),
    Field("WorkDir", 20, _of_job(lambda one: one.work_folder)),
)
FIELDS: Mapping[str, Field] = {field.name.lower(): field for field in _FIELDS}
_WHOLE = frozenset({"JobID", "JobIDRaw"})


def main(words: Sequence[str]) -> int:
    """List jobs and return the exit code.

    Raises:
        SlurmError: an option is invalid.
    """
    given, others = read(NAME, words, OPTIONS)
    if "help" in given:
        print("Usage: sacct [-j JOB,…] [-o FIELD,…] [-n] [-P] [-X] [-S TIME] [-s STATE,…]\nLists jobs of Cotenant.")
        return 0
    if "helpformat" in given:
        print("\n".join(field.name for field in _FIELDS))
        return 0
    if others:
        raise SlurmError(f"Unknown arguments: {' '.join(others)}")
    fields = _fields(given)
    now = time.time()
    jobs = call(lambda mesh: _find(mesh, given, now))
    states = read_states(given["state"]) if "state" in given else None
    found = [one for job in jobs if (one := Facts(job, now)) and (states is None or one.state in states)]
    steps = "allocations" not in given
    rows = [line for one in found if _matches(one, given) for line in _lines(one, steps)]
    if steps and (only := _steps(given.get("jobs", ""))):
        rows = [line for line in rows if line.step in only]
    if "parsable" in given or "parsable2" in given:
        _print_parsable(fields, rows, given)
    else:
        _print_table(fields, rows, heading="noheader" not in given)
    return 0


def _fields(given: Mapping[str, str]) -> list[Field]:
    preset = LONG if "long" in given else BRIEF if "brief" in given else FORMAT
    wanted = given.get("format") or os.environ.get("SACCT_FORMAT") or preset
    found = []
    for part in filter(None, wanted.split(",")):
        name, percent, width = part.strip().partition("%")
        if name.lower() not in FIELDS or (percent and not width.lstrip("-").isdecimal()):
            raise SlurmError(f'Invalid field requested: "{part}"')
        field = FIELDS[name.lower()]
        found.append(field._replace(width=-int(width)) if percent else field._replace(width=-field.width))
    return found


async def _find(mesh: Mesh, given: Mapping[str, str], now: float) -> list[Job]:
    if given.get("jobs"):
        by_id = await find_each(mesh, list(dict.fromkeys(read_ids(given["jobs"]))))
        return in_order([job for found in by_id.values() for job in found])
    everybody = "allusers" in given or (given.get("user") not in (None, user_name()))
    wanted = JobFilter(own_only=not everybody, name=given.get("name", ""), tenant=given.get("accounts", ""))
    today = time.mktime((*time.localtime(now)[:3], 0, 0, 0, 0, 0, -1))
    try:
        since = times.read_moment(given["starttime"], now) if "starttime" in given else today
    except ValueError:
        raise SlurmError(f"Invalid time specification (pos=0): {given['starttime']}") from None
    jobs = await list_jobs(mesh, wanted)
    begun = timestamp(since).seconds
    return in_order([job for job in jobs if not job.HasField("end_time") or job.end_time.seconds >= begun])


def _matches(one: Facts, given: Mapping[str, str]) -> bool:
    users = [name for name in given.get("user", "").split(",") if name]
    return not users or users == [user_name()] or one.job.submitter in users


def _lines(one: Facts, steps: bool) -> Iterator[Line]:
    yield Line(one)
    if steps and one.start is not None:
        yield Line(one, BATCH)


def _steps(ids: str) -> set[str]:
    """Return the steps that a list of ids asks for; empty if it names whole jobs.

    >>> sorted(_steps("17.batch,18.0")), _steps("17,18.0"), _steps("")
    (['.0', '.batch'], set(), set())
    """
    parts = [part.partition(".") for part in ids.split(",")]
    return {f".{step}" for _, dot, step in parts if dot} if all(dot for _, dot, _ in parts) else set()


def _print_parsable(fields: Sequence[Field], rows: Sequence[Line], given: Mapping[str, str]) -> None:
    delimiter = given.get("delimiter", "|")
    end = delimiter if "parsable" in given else ""
    if "noheader" not in given:
        print(delimiter.join(field.name for field in fields) + end)
    for row in rows:
        print(delimiter.join(field.value(row) for field in fields) + end)


def _print_table(fields: Sequence[Field], rows: Sequence[Line], *, heading: bool) -> None:
    values = [[_cut(field, field.value(row)) for field in fields] for row in rows]
    widths = [
        max([abs(field.width), *(len(row[place]) for row in values if field.name in _WHOLE)])
        for place, field in enumerate(fields)
    ]

    def line(texts: Sequence[str]) -> str:
        return "".join(
            f"{text.ljust(width) if _is_left(field) else text.rjust(width)} "
            for text, width, field in zip(texts, widths, fields, strict=True)
        )

    if heading:
        print(line([field.name[:width] for field, width in zip(fields, widths, strict=True)]))
        print(line(["-" * width for width in widths]))
    for row in values:
        print(line(row))


def _is_left(field: Field) -> bool:
    return field.name in _WHOLE or field.width > 0


def _cut(field: Field, text: str) -> str:
    width = abs(field.width)
    return text if len(text) <= width or field.name in _WHOLE else f"{text[: width - 1]}+"


def _has_ended(one: Facts) -> bool:
    return one.job.HasField("end_time")


def _limit(seconds: float | None) -> str:
    return "UNLIMITED" if seconds is None else times.write_elapsed(seconds)
