"""The environment variables of a job's processes: a pure function of the assignment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.run_as import User, own_user
from cotenant.v1 import resources_pb2

PARAMETER_SERVER_ROLE = "ps"
INHERITED_VARIABLES = ("LANG", "LC_ALL", "TZ")
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"  # login.defs(5), ENV_PATH
PATH_OF_ROOT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # login.defs(5), ENV_SUPATH


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that jobs inherit from the agent: those that describe the machine, and no others.

    The agent's PATH may be that of a virtual environment; its LD_LIBRARY_PATH and PYTHONPATH are not for jobs.

    >>> clean_environment({"LANG": "C.UTF-8", "PATH": "/srv/agent/bin", "COTENANT_TOKEN": "secret"})
    {'LANG': 'C.UTF-8'}
    """
    return {name: environment[name] for name in INHERITED_VARIABLES if name in environment}


def environment_of_user(user: User | None) -> dict[str, str]:
    """Return the variables that a login sets for a job's user; None: the agent's own user."""
    found = user or own_user()
    return {**found.environment(), "PATH": PATH if found.uid else PATH_OF_ROOT}


def task_environment(
    assignment: agent_pb2.Assignment,
    task: resources_pb2.TaskAllocation,
    *,
    base: Mapping[str, str],
    enforced: Mapping[str, str],
    progress_path: str,
) -> dict[str, str]:
    """Return all variables of one replica.

    The user's variables override inherited ones and defaults; variables that describe the replica's resources
    (`enforced`, from the enforcement hooks) and its identity override the user's.
    """
    variables = dict(base)
    variables["OMP_NUM_THREADS"] = str(max(1, len(task.core_ids)))
    variables["PYTHONUNBUFFERED"] = "1"  # output is read while the job runs
    variables.update(assignment.spec.environment)
    variables.update(enforced)
    variables.update(_replica_variables(assignment, progress_path))
    variables.update(_gang_variables(assignment, task))
    variables.update(_array_variables(assignment))
    return variables


def _replica_variables(assignment: agent_pb2.Assignment, progress_path: str) -> dict[str, str]:
    return {
        **({"COTENANT_PRE_RUN": "1"} if assignment.pre_run else {}),
        "COTENANT_JOB_ID": assignment.job_id,
        "COTENANT_ATTEMPT": str(assignment.number),
        "COTENANT_PROGRESS": progress_path,
    }


def _gang_variables(assignment: agent_pb2.Assignment, task: resources_pb2.TaskAllocation) -> dict[str, str]:
    ranks_here = sorted(other.rank for other in assignment.allocation.tasks)
    variables = {
        "MASTER_ADDR": assignment.master_address,
        "MASTER_PORT": str(assignment.master_port),
        "RANK": str(task.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_RANK": str(ranks_here.index(task.rank)),
        "LOCAL_WORLD_SIZE": str(len(ranks_here)),
        "NODE_RANK": str(assignment.node_rank),
    }
    if PARAMETER_SERVER_ROLE in assignment.replica_roles:
        variables["TF_CONFIG"] = tf_config(
            assignment.replica_roles, assignment.replica_addresses, assignment.master_port, task.rank
        )
    return variables


def _array_variables(assignment: agent_pb2.Assignment) -> dict[str, str]:
    """Return the variables that identify a job within its array."""
    if not assignment.spec.HasField("array_task"):
        return {}
    task = assignment.spec.array_task
    return {
        "COTENANT_ARRAY_ID": task.array_id,
        "COTENANT_ARRAY_INDEX": str(task.index),
        "COTENANT_ARRAY_COUNT": str(task.count),
    }


def tf_config(roles: Sequence[str], addresses: Sequence[str], first_port: int, rank: int) -> str:
    """Return TensorFlow's description of the cluster as JSON. Replica r listens on `first_port` + r.

    >>> tf_config(["ps", "worker"], ["a", "b"], 7000, 1)
    '{"cluster": {"ps": ["a:7000"], "worker": ["b:7001"]}, "task": {"type": "worker", "index": 0}}'
    """
    cluster: dict[str, list[str]] = {}
    index_of_rank = []
    for replica, (role, address) in enumerate(zip(roles, addresses, strict=True)):
        members = cluster.setdefault(role, [])
        index_of_rank.append(len(members))
        members.append(f"{address}:{first_port + replica}")
    return json.dumps({"cluster": cluster, "task": {"type": roles[rank], "index": index_of_rank[rank]}})
