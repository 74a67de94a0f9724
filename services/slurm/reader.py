"""Reads the JSON of Slurm's commands and of slurmrestd into records. Pure.

Versions differ: a number may be a number, its digits, or `{"set": …, "infinite": …, "number": …}`; a state may be a
word or a list of words; fields come and go. Unknown fields are ignored. A missing one has its default, and is named
once per answer, with the version, if jobs or nodes cannot be described without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cotenant.services.slurm.hostlist import BadList, hosts, tasks
from cotenant.services.slurm.records import MIB, Placed, Reading, SlurmJob, SlurmNode

Fields = Mapping[str, Any]

NO_LIMIT = 0xFFFFFFFE  # this and the number after it are Slurm's "not set" and "infinite"
NUMBER_MAX = 1e15
COUNT_MAX = 2**32
MINUTES_MAX = 5_000_000  # ten years; a longer limit is none
TIME_MAX = 2**36  # unix seconds; some thousand years
SIZE_MAX = 1_000_000  # CPUs, nodes, tasks and GPUs of a job
EXIT_MAX = 255
PER_NODE_MAX = 4096  # cores and GPUs
MEMORY_MAX = 2**60
TASKS_MAX = 10_000  # of one array, that are shown one by one
PROBLEMS_MAX = 20
NEEDED_OF_JOBS = ("job_id", "job_state", "cpus", "partition", "submit_time")
NEEDED_OF_NODES = ("name", "cpus", "state")
_GRES = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[A-Za-z][\w.-]*))?(?:[:=](?P<count>\d{1,6}))?(?:\(.*)?")
_INDICES = re.compile(r"gpu[^,(]*\(IDX:([\d,-]+)\)")


class BadAnswer(ValueError):
    """An answer that is not JSON with Slurm's jobs or nodes."""


def read(text: str | bytes) -> Reading:
    """Return the jobs and nodes in an answer.

    Raises:
        BadAnswer: it is not JSON with a list of jobs or nodes.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"Slurm's answer is not JSON: {error}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("jobs", answer.get("nodes")), list):
        raise BadAnswer(f"Slurm's answer has neither jobs nor nodes{_errors(answer)}")
    if (failure := _errors(answer)) and not (
        answer.get("jobs") or answer.get("nodes")
    ):  # the exit code is 0 all the same
        raise BadAnswer(f"Slurm's answer is an error{failure}")
    version, problems = _version(answer), dict[str, None]()
    jobs = [job for one in _maps(answer.get("jobs")) for job in _jobs(one, problems)]
    nodes = [node for one in _maps(answer.get("nodes")) if (node := _node(one, problems))]
    what = f"Slurm {version}" if version else "this Slurm"
    said = tuple(f"{what}: {problem}" for problem in list(problems)[:PROBLEMS_MAX])
    return Reading(tuple(jobs), tuple(nodes), version, said)


def _errors(answer: object) -> str:
    """Return the errors in an answer, after a colon."""
    found = answer.get("errors") if isinstance(answer, dict) else None
    said = [word(one.get("description") or one.get("error")) or "unknown" for one in _maps(found)]
    return f": {'; '.join(said)[:300]}" if said else ""


def _version(answer: Fields) -> str:
    """Return the release, which newer versions have under another name."""
    meta = answer.get("meta")
    about = (meta.get("Slurm") or meta.get("slurm")) if isinstance(meta, dict) else None
    return word(about.get("release"))[:40] if isinstance(about, dict) else ""


# Values --------------------------------------------------------------------------------------------------------


def number(value: object) -> float | None:
    """Return a number in any of Slurm's forms; None if it is not set, infinite, or none.

    >>> number(30), number("30"), number({"set": True, "infinite": False, "number": 30}), number({"set": False})
    (30.0, 30.0, 30.0, None)
    >>> number({"set": True, "infinite": True, "number": 0}), number(0xFFFFFFFE), number(True)
    (None, None, None)
    """
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if 0 <= found < NUMBER_MAX and found not in (NO_LIMIT, NO_LIMIT + 1) else None


def count(value: object, most: int = COUNT_MAX) -> int:
    """Return a whole number, 0 if there is none."""
    return min(most, int(number(value) or 0))


def word(value: object) -> str:
    """Return a text; the first of a list; "" if there is none.

    >>> word(["RUNNING"]), word("n/a"), word(None)
    ('RUNNING', 'n/a', '')
    """
    if isinstance(value, list):
        value = value[0] if value else ""
    return _valid(value) if isinstance(value, str) else ""


def _valid(text: str) -> str:
    """Return a text without lone surrogates, which JSON may escape and UTF-8 cannot say."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def words(value: object) -> tuple[str, ...]:
    """Return a list of texts, which may be given as one text with commas."""
    if isinstance(value, str):
        return tuple(one.strip() for one in _valid(value).split(",") if one.strip())
    return tuple(_valid(one) for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _maps(value: object) -> Sequence[Fields]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def gpus(text: str) -> tuple[int, str]:
    """Return the number of GPUs in a list of generic resources, and their type if it has one.

    >>> gpus("gpu:a100:4"), gpus("gres:gpu:2"), gpus("gres/gpu=3,gres/shard=1"), gpus("craynetwork:1")
    ((4, 'a100'), (2, ''), (3, ''), (0, ''))
    """
    total, types = 0, dict[str, None]()
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        if found := _GRES.fullmatch(part.strip()):
            total += int(found["count"] or 1)
            types[found["type"] or ""] = None
    return total, next(iter(types), "") if len(types) == 1 else ""


def _hosts(value: object, problems: dict[str, None]) -> tuple[str, ...]:
    try:
        return hosts(",".join(words(value)) if isinstance(value, list) else word(value))
    except BadList as error:
        problems[str(error)] = None
        return ()


def _note_missing(fields: Fields, needed: Sequence[str], what: str, problems: dict[str, None]) -> None:
    for name in needed:
        if name not in fields:
            problems[f"{what} have no field {name!r}"] = None


# Nodes ---------------------------------------------------------------------------------------------------------


def _node(fields: Fields, problems: dict[str, None]) -> SlurmNode | None:
    _note_missing(fields, NEEDED_OF_NODES, "nodes", problems)
    name = word(fields.get("name"))
    if not name:
        return None
    threads = max(1, count(fields.get("threads"), PER_NODE_MAX))
    states = {*words(fields.get("state")), *words(fields.get("state_flags"))}
    gpu_count, gpu_type = gpus(word(fields.get("gres")))
    return SlurmNode(
        name=name,
        cores=min(count(fields.get("cpus")) // threads, PER_NODE_MAX),
        threads=threads,
        sockets=max(1, count(fields.get("sockets"))),
        memory_bytes=min(MEMORY_MAX, count(fields.get("real_memory")) * MIB),
        gpus=min(gpu_count, PER_NODE_MAX),
        gpu_type=gpu_type,
        features=frozenset(words(fields.get("active_features")) or words(fields.get("features"))),
        partitions=frozenset(words(fields.get("partitions"))),
        states=frozenset(state.upper() for state in states),
        reason=word(fields.get("reason")),
        version=word(fields.get("slurmd_version") or fields.get("version")),
        address=word(fields.get("address")),
    )


# Jobs ----------------------------------------------------------------------------------------------------------


def _jobs(fields: Fields, problems: dict[str, None]) -> Iterator[SlurmJob]:
    """Yield the job of an entry; of the pending rest of an array, each task."""
    _note_missing(fields, NEEDED_OF_JOBS, "jobs", problems)
    number_of_job = count(fields.get("job_id"))
    if not number_of_job:
        return
    array, het = count(fields.get("array_job_id")), count(fields.get("het_job_id"))
    rest, task = word(fields.get("array_task_string")), number(fields.get("array_task_id"))
    if array and rest:
        try:
            indices = tasks(rest)
        except BadList:
            indices = ()
        if 0 < len(indices) <= TASKS_MAX:
            yield from (_job(fields, f"{array}_{index}", problems, task=index) for index in indices)
            return
        problems[f"array {array} is shown as one job: {rest[:60]!r}"] = None
        yield _job(fields, f"{array}_[{rest[:60]}]", problems)
    elif array and task is not None:
        yield _job(fields, f"{array}_{int(task)}", problems, task=int(task))
    elif het:
        yield _job(fields, f"{het}+{count(fields.get('het_job_offset'))}", problems)
    else:
        yield _job(fields, str(number_of_job), problems)


def _job(fields: Fields, job_id: str, problems: dict[str, None], task: int | None = None) -> SlurmJob:
    states = [state.upper() for state in words(fields.get("job_state"))] or ["UNKNOWN"]
    nodes_min = max(1, count(fields.get("node_count"), SIZE_MAX))
    processes = count(fields.get("tasks"), SIZE_MAX)
    per_node, total, gpu_type = _gpus(fields, nodes_min, processes)
    code, signal = _exit(fields.get("exit_code"))
    minutes = number(fields.get("time_limit"))
    minutes = None if minutes is None or minutes > MINUTES_MAX else minutes
    return SlurmJob(
        id=job_id,
        number=count(fields.get("job_id")),
        state=states[0],
        flags=frozenset(states[1:]),
        reason="" if word(fields.get("state_reason")) == "None" else word(fields.get("state_reason")),
        array=count(fields.get("array_job_id")),
        task=task,
        tasks_running_max=count(fields.get("array_max_tasks"), SIZE_MAX),
        het=count(fields.get("het_job_id")),
        name=word(fields.get("name")),
        user=word(fields.get("user_name")) or str(count(fields.get("user_id"))),
        user_id=None if number(fields.get("user_id")) is None else count(fields.get("user_id")),
        account=word(fields.get("account")),
        qos=word(fields.get("qos")),
        partitions=words(fields.get("partition")),
        cpus=count(fields.get("cpus"), SIZE_MAX),
        nodes_min=nodes_min,
        processes=processes,
        gpus_per_node=min(per_node, SIZE_MAX),
        gpus_total=min(total, SIZE_MAX),
        gpu_type=gpu_type,
        memory_bytes=_memory(word(fields.get("tres_alloc_str")) or word(fields.get("tres_req_str"))),
        exclusive="none" in (word(fields.get("shared")), *words(fields.get("shared"))),
        features=word(fields.get("features")),
        required_nodes=_hosts(fields.get("required_nodes"), problems),
        excluded_nodes=_hosts(fields.get("excluded_nodes"), problems),
        dependency=word(fields.get("dependency")),
        reservation=word(fields.get("resv_name")),
        priority=count(fields.get("priority")),
        time_limit_seconds=None if minutes is None else minutes * 60,
        **_times(fields),
        restarts=count(fields.get("restart_cnt"), SIZE_MAX),
        exit_code=code,
        signal=signal,
        placed=tuple(_placed(fields, problems)),
        command=word(fields.get("command")),
        directory=word(fields.get("current_working_directory")),
        admin_comment=word(fields.get("admin_comment")),
        output=_path(word(fields.get("standard_output"))),
    )


def _path(text: str) -> str:
    """Return a path without placeholders, which some versions leave in; "" if it has any."""
    return "" if "%" in text else text


def _times(fields: Fields) -> dict[str, float]:
    names = {
        "submitted_seconds": "submit_time",
        "eligible_seconds": "eligible_time",
        "started_seconds": "start_time",
        "ended_seconds": "end_time",
        "suspended_seconds": "suspend_time",
        "ran_before_suspension_seconds": "pre_sus_time",
    }
    found = {ours: number(fields.get(slurms)) or 0.0 for ours, slurms in names.items()}
    return {name: seconds if seconds < TIME_MAX else 0.0 for name, seconds in found.items()}


def _gpus(fields: Fields, nodes: int, processes: int) -> tuple[int, int, str]:
    """Return the GPUs on each node if that is how they were asked for, in total, and their type."""
    for name, factor in (("tres_per_node", nodes), ("tres_per_job", 1), ("tres_per_task", max(1, processes))):
        found, gpu_type = gpus(word(fields.get(name)))
        if found:
            return (found if name == "tres_per_node" else 0), found * factor, gpu_type
    found, gpu_type = gpus(word(fields.get("tres_alloc_str")) or word(fields.get("tres_req_str")))
    return 0, found, gpu_type


def _memory(tres: str) -> int:
    """Return the bytes of memory in a list of trackable resources.

    >>> _memory("cpu=8,mem=1.5G,node=2") == 1536 * MIB, _memory("cpu=8")
    (True, 0)
    """
    found = re.search(r"(?:^|,)mem=(\d{1,12}(?:\.\d{1,6})?)([KMGTP]?)", tres)
    if not found:
        return 0
    factor = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}[found[2]]
    return min(MEMORY_MAX, int(float(found[1]) * MIB * factor))


def _exit(value: object) -> tuple[int, int]:
    """Return the exit code and the signal; older versions pack them as `wait` does."""
    if isinstance(value, dict) and ("return_code" in value or "signal" in value):
        signal = value.get("signal")
        found = signal.get("id") if isinstance(signal, dict) else signal
        return count(value.get("return_code"), EXIT_MAX), count(found, EXIT_MAX)
    packed = count(value)
    return (packed >> 8) & 0xFF, packed & 0x7F


def _placed(fields: Fields, problems: dict[str, None]) -> Iterator[Placed]:
    """Yield what a job holds on each of its nodes."""
    names = _hosts(fields.get("nodes"), problems)
    resources = fields.get("job_resources")
    by_node = dict(_allocated_cores(resources)) if isinstance(resources, dict) else {}
    details = fields.get("gres_detail")
    indices = [_gpu_indices(word(one)) for one in details] if isinstance(details, list) else []
    for place, name in enumerate(names):
        yield Placed(name, by_node.get(name, ()), indices[place] if place < len(indices) else ())


def _gpu_indices(text: str) -> tuple[int, ...]:
    """Return the indices of GPUs in a detail such as `gpu:a100:2(IDX:0-1)`."""
    try:
        return tuple(index for found in _INDICES.finditer(text) for index in tasks(found[1]))
    except BadList:
        return ()


def _allocated_cores(resources: Fields) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield nodes with the numbers of their allocated cores; sockets have equally many."""
    nodes = resources.get("allocated_nodes")
    if nodes is None:
        inner = resources.get("nodes")
        nodes = inner.get("allocation") if isinstance(inner, dict) else None
    for node in _maps(nodes):
        name = word(node.get("nodename") or node.get("name") or node.get("node"))
        sockets = node.get("sockets")
        if isinstance(sockets, dict):
            pairs = [(count(index, PER_NODE_MAX), _core_states(one)) for index, one in sockets.items()]
        else:
            pairs = [(count(one.get("index"), PER_NODE_MAX), _core_states(one)) for one in _maps(sockets)]
        cores = tuple(sorted((socket, core) for socket, found in pairs for core in found))
        yield name, tuple(socket * 1000 + core for socket, core in cores)


def _core_states(socket: object) -> list[int]:
    cores = socket.get("cores") if isinstance(socket, dict) else None
    if isinstance(cores, dict):
        return [
            count(index, PER_NODE_MAX) for index, state in cores.items() if word(state).lower().startswith("allocated")
        ]
    return [
        count(one.get("index"), PER_NODE_MAX)
        for one in _maps(cores)
        if "ALLOCATED" in map(str.upper, words(one.get("status")))
    ]
