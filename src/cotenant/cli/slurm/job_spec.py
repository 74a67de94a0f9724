"""The job that `sbatch` and `srun` submit, from Slurm's options."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cotenant.cli.jobs.submit_directory import find_directory
from cotenant.cli.outcome import is_text
from cotenant.cli.quick_table import JOB, SUBMIT_VARIABLES
from cotenant.cli.slurm import patterns, times
from cotenant.cli.slurm.conventions import COMMENT, KILL_WAIT_SECONDS, QUEUE, TERMINATE
from cotenant.cli.slurm.job_ids import read_id
from cotenant.cli.slurm.options import Given
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.cli.slurm.shape import Shape, Values, shape_of
from cotenant.codec.times import duration, timestamp
from cotenant.core.model.priority import CLASSES
from cotenant.v1 import job_pb2 as pb

SIGNAL_SECONDS_DEFAULT = 60
SHELL = "/bin/sh"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_SESSION = frozenset(  # they describe the shell, its terminal and its machine, not the work
    {
        *("_", "COLUMNS", "DISPLAY", "HOME", "HOSTNAME", "LINES", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD", "PWD"),
        *("SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "WINDOWID", "XAUTHORITY", *SUBMIT_VARIABLES),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "SUDO_COMMAND"),
    }
)
_OF_SESSION_PREFIXES = ("COTENANT_", "SLURM", "SBATCH_", "DBUS_", "SSH_", "XDG_", "TMUX", "STY")
_SIGNAL = r"(?i)(?:([RB]+):)?(?:SIG)?([A-Z0-9]+)(?:@(\d{1,6}))?"
_DEPENDENCY = r"(?i)(afterok|afterany|afternotok|after|aftercorr):([\w:+]+)|(singleton)"
_CONDITIONS = {
    "afterok": pb.DEPENDENCY_CONDITION_AFTER_OK,
    "afterany": pb.DEPENDENCY_CONDITION_AFTER,
    "afternotok": pb.DEPENDENCY_CONDITION_AFTER_FAIL,
    "after": pb.DEPENDENCY_CONDITION_AFTER_STARTED,
}
_NOT_EXPRESSED = {
    "aftercorr": "would start each task after the other array's task with its index; afterok waits for all of them"
}
SINGLETON = "singleton"
MINUTES_DIGITS_MAX = 7


class Script(NamedTuple):
    """A batch script: its text, the name that the job gets by default, and its arguments."""

    text: str
    name: str
    arguments: Sequence[str] = ()


class EarlySignal(NamedTuple):
    """The signal before the time limit, and whether only the batch shell gets it, or only its steps."""

    signal: str = TERMINATE
    seconds: int = KILL_WAIT_SECONDS
    only_steps: bool = False


class Submission(NamedTuple):
    """A job to submit.

    `singleton` says that it waits for the caller's jobs of the same name, `delays` for how many minutes after the start
    of others.
    """

    spec: pb.JobSpec
    shape: Shape
    singleton: bool
    delays: Sequence[tuple[str, int]] = ()


def submission_of(given: Given, script: Script, user: str, warn: Callable[[str], None]) -> Submission:
    """Return the job that the options describe.

    Raises:
        SlurmError: names every invalid option.
    """
    wrong: list[str] = []
    values = Values(given, wrong)
    shape = shape_of(values, warn)
    spec = pb.JobSpec.FromString(JOB)
    spec.name = given.get("job-name", script.name)
    _set_resources(spec, shape)
    warning = values.read("signal", read_signal, EarlySignal())
    _set_times(spec, values, warning)
    _set_place(spec, given, warn)
    _set_sharing(spec, values, warn)
    singleton, delays = _set_dependencies(spec, values)
    if "array" in given:
        _set_array(spec, values)
    folder = str(Path.cwd())
    variables = _slurm_variables(given, shape, spec, folder, user)
    spec.environment.update(_exported(given, os.environ) | variables)
    spec.command.extend(_command(given, script, shape.nodes, warning, is_array="array" in given))
    if wrong:
        raise SlurmError(*wrong)
    return Submission(spec, shape, singleton, delays)


def _set_resources(spec: pb.JobSpec, shape: Shape) -> None:
    [role] = spec.roles
    role.replicas = shape.nodes
    if shape.nodes > 1:
        spec.spread.by, spec.spread.min = pb.SPREAD_BY_NODE, shape.nodes
    wanted = role.resources
    if shape.cores is not None:
        wanted.cores = shape.cores
    wanted.memory_bytes = shape.memory_bytes
    if shape.gpus.number:
        wanted.gpu_milli, wanted.gpu_type = 1000 * shape.gpus.number, shape.gpus.gpu_type
        spec.kind = pb.JOB_KIND_TRAINING


def _set_times(spec: pb.JobSpec, values: Values, warning: EarlySignal) -> None:
    """Set the limit so that the warning signal comes when Slurm sends it."""
    limit = values.read("time", times.read_limit, None)
    spec.warning_signal = warning.signal
    spec.grace.CopyFrom(duration(warning.seconds))
    if limit is not None:
        spec.time_limit.CopyFrom(duration(limit + (KILL_WAIT_SECONDS if warning.signal == TERMINATE else 0)))
    if "begin" in values:
        now = time.time()
        moment = values.read("begin", lambda text: times.read_moment(text, now), now)
        if moment > now:
            spec.begin_time.CopyFrom(timestamp(moment))
    spec.hold = "hold" in values


def read_signal(text: str) -> EarlySignal:
    """Return the warning signal of `[B:]SIGNAL[@SECONDS]`.

    >>> read_signal("B:USR1@120")
    EarlySignal(signal='SIGUSR1', seconds=120, only_steps=False)
    >>> read_signal("12")
    EarlySignal(signal='SIGUSR2', seconds=60, only_steps=True)

    Raises:
        ValueError: the text is none.
    """
    import signal  # few jobs have one

    match = re.fullmatch(_SIGNAL, text)
    if not match:
        raise ValueError(text)
    name = match[2].upper()
    found = signal.Signals(int(name)).name if name.isdecimal() else f"SIG{name}"
    if not hasattr(signal.Signals, found):
        raise ValueError(text)
    return EarlySignal(found, int(match[3] or SIGNAL_SECONDS_DEFAULT), "B" not in (match[1] or "").upper())


def _set_place(spec: pb.JobSpec, given: Given, warn: Callable[[str], None]) -> None:
    """Set the working directory, the submitter's folder and the queue."""
    if folder := find_directory(os.environ):
        spec.submit_directory.path, spec.submit_directory.inode = folder.path, folder.inode
        spec.submit_directory.owner_uid = folder.owner_uid
        spec.submit_directory.environment.update(dict(folder.environment))
    if "chdir" in given:
        spec.working_directory = os.path.normpath(os.path.join(Path.cwd(), given["chdir"]))
    partitions = given.get("partition", QUEUE).split(",")
    if QUEUE not in partitions:
        warn(f"--partition={given['partition']}: there is no such queue; ignored")


def _set_sharing(spec: pb.JobSpec, values: Values, warn: Callable[[str], None]) -> None:
    """Set who is charged, and how urgent the job is."""
    given = values.given
    spec.tenant = given.get("account", "")
    if (qos := given.get("qos")) is not None:
        if qos in CLASSES:
            spec.priority = CLASSES[qos]
        else:
            warn(f"--qos={qos}: known are {', '.join(CLASSES)}; ignored")
    spec.priority = values.read("priority", int, spec.priority)
    if given.get(COMMENT):
        spec.labels[COMMENT] = given[COMMENT]
    if "no-requeue" in given:
        spec.preemptible = False


def _set_array(spec: pb.JobSpec, values: Values) -> None:
    from cotenant.core.model.job_array import read_array

    array = values.read("array", read_array, None, "Invalid job array specification: {value}")
    if array is None:
        return
    spec.array.running_max = array.running_max
    for part in array.ranges:
        spec.array.ranges.add(first=part.first, last=part.last, step=part.step)
    indices = array.indices
    spec.environment.update(
        SLURM_ARRAY_TASK_COUNT=str(len(indices)),
        SLURM_ARRAY_TASK_MIN=str(indices[0]),
        SLURM_ARRAY_TASK_MAX=str(indices[-1]),
        SLURM_ARRAY_TASK_STEP=str(min(part.step for part in array.ranges)),
    )


def _set_dependencies(spec: pb.JobSpec, values: Values) -> tuple[bool, list[tuple[str, int]]]:
    """Set the dependencies; return whether the job is a singleton, and its delays."""
    delays = list[tuple[str, int]]()

    def read(text: str) -> bool:
        singleton = False
        if "?" in text:
            raise SlurmError("? would start it after any of several jobs; here all of its dependencies must hold")
        for part in filter(None, text.split(",")):
            match = re.fullmatch(_DEPENDENCY, part)
            if not match:
                raise ValueError(text)
            singleton |= bool(match[3])
            for one in (match[2] or "").split(":") if match[2] else ():
                kind = match[1].lower()
                if kind in _NOT_EXPRESSED:
                    raise SlurmError(f"{part}: {_NOT_EXPRESSED[kind]}")
                job_id, plus, minutes = one.partition("+")
                if plus and (kind != "after" or not minutes.isdecimal() or len(minutes) > MINUTES_DIGITS_MAX):
                    raise ValueError(text)
                spec.dependencies.add(id=read_id(job_id), condition=_CONDITIONS[kind])
                if plus:
                    delays.append((read_id(job_id), int(minutes)))
        return singleton

    message = "Batch job submission failed: Job dependency problem: --dependency={value}"
    try:
        return values.read("dependency", read, False, message), delays
    except SlurmError as error:
        values.wrong.append(f"{message.format(value=values.given['dependency'])}: {error}")
        return False, delays


def _slurm_variables(given: Given, shape: Shape, spec: pb.JobSpec, folder: str, user: str) -> dict[str, str]:
    """Return the variables that are the same on every node and for every task."""
    per_node = str(shape.tasks_per_node) + (f"(x{shape.nodes})" if shape.nodes > 1 else "")
    found: dict[str, object] = {
        "SLURM_CLUSTER_NAME": "cotenant",
        "SLURM_JOB_ACCOUNT": spec.tenant or "default",
        "SLURM_JOB_CHDIR": spec.working_directory,
        "SLURM_JOB_NAME": spec.name,
        "SLURM_JOB_NUM_NODES": shape.nodes,
        "SLURM_JOB_PARTITION": QUEUE,
        "SLURM_JOB_QOS": given.get("qos", "normal"),
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_USER": user,
        "SLURM_NNODES": shape.nodes,
        "SLURM_NPROCS": shape.tasks,
        "SLURM_NTASKS": shape.tasks,
        "SLURM_NTASKS_PER_NODE": given.get("ntasks-per-node", ""),
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_SUBMIT_HOST": os.uname().nodename,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_CPUS_PER_TASK": shape.cpus_per_task or "",
        "SLURM_GPUS": shape.gpus.number * shape.nodes or "",
        "SLURM_GPUS_PER_NODE": shape.gpus.number or "",
        "SLURM_GPUS_PER_TASK": shape.gpus_per_task or "",
        "SLURM_MEM_PER_NODE": shape.memory_bytes >> 20 or "",
        **spec.environment,
    }
    return {name: str(value) for name, value in found.items() if value != ""}


def _exported(given: Given, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the job gets from the submitter's environment, by `--export`."""
    wanted = given.get("export", "ALL").split(",")
    everything = "ALL" in wanted
    found = {
        name: value
        for name, value in environment.items()
        if everything and name not in _OF_SESSION and not name.startswith(_OF_SESSION_PREFIXES)
    }
    for part in wanted:
        name, assigned, value = part.partition("=")
        if assigned:
            found[name] = value
        elif name in environment and name not in ("ALL", "NONE", "NIL"):
            found[name] = environment[name]
    return {name: value for name, value in found.items() if _VARIABLE.fullmatch(name) and is_text(value)}


def _command(given: Given, script: Script, nodes: int, warning: EarlySignal, *, is_array: bool) -> list[str]:
    """Return the command that runs the script on its nodes."""
    interpreter, option = interpreter_of(script.text)
    pattern = given.get("output") or (patterns.DEFAULT_OF_ARRAY if is_array else patterns.DEFAULT)
    append = "append" if given.get("open-mode", "").startswith("a") else ""
    steps_signal = warning.signal.removeprefix("SIG") if warning.only_steps else ""
    program = srun_program() if "srun" in script.text or nodes > 1 else ""
    return [
        *(SHELL, "-c", shell_text("common.sh", "batch.sh"), "slurm_script"),
        *(pattern, given.get("error", ""), append, steps_signal, interpreter, option, program, script.text),
        *script.arguments,
    ]


def interpreter_of(text: str) -> tuple[str, str]:
    """Return the interpreter that a script's first line names, and its option."""
    interpreter, _, option = text.partition("\n")[0].removeprefix("#!").strip().partition(" ")
    return interpreter, option.strip()


def srun_program() -> str:
    """Return the shell program that is `srun` within a job."""
    return shell_text("common.sh", "srun.sh")


def shell_text(*names: str) -> str:
    """Return shell files of this package without comments and indentation, since each job carries them."""
    here = os.path.dirname(__file__)
    lines: list[str] = []
    for name in names:
        with open(os.path.join(here, name), encoding="utf-8") as file:
            lines += (line.strip() for line in file)
    return "\n".join(line for line in lines if line and not line.startswith("#"))
