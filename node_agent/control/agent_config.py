"""The settings of an agent, in a module of their own: starting an agent process does not import the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

MEBIBYTE = 1 << 20
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The settings of an agent.

    `gpus` is "auto" or "fake:N". `cpus` restricts jobs to a subset of the logical CPUs, `memory_bytes` to a part of
    the memory. `address` is the host name under which other nodes reach this one, by default `node_id`.
    `shareable_gpus` lets several jobs have shares of a GPU; `split_siblings` makes each logical CPU a core.
    An empty `contention_endpoint` means that no samples are sent. `memory_bandwidth_peak` is the most memory bandwidth
    that the node has, in bytes per second; 0: the most that was seen. `kept_max` and `kept_seconds_max` bound for how
    many acknowledged attempts, and for how long, output stays readable. `pids_max` is how many processes and threads
    each task of a job that names none may have; 0 means no limit but that of the whole attempt, half of the node's.
    `work_bytes_max` is what an attempt's own directory may take, 0: as much as there is; `disk_reserve_bytes` of the
    file system are kept free of jobs' files.
    `users` says as whom submitters' jobs run where the agent is root, if not as the user of the same name. An agent
    that is not root runs jobs of several submitters only with `shared_identity`. `hidden` are files and directories
    that jobs are not to see, where that can be had, beside the state directory. Without `share_machine` the agent does
    not start where another one of the same user offers some of its CPUs, and placement holds one of two such nodes.
    `machine_parts` is how many agents the machine is divided among: each offers as much of its memory.
    """

    node_id: str
    state_dir: Path
    placement_endpoint: str
    contention_endpoint: str = ""
    token: str = ""
    gpus: str = "auto"
    cpus: tuple[int, ...] | None = None
    memory_bytes: int | None = None
    rack: str = ""
    address: str = ""
    shareable_gpus: bool = False
    split_siblings: bool = False
    output_bytes_max: int = 64 * MEBIBYTE
    sample_interval_seconds: float = 5.0
    memory_bandwidth_peak: float = 0.0
    health_interval_seconds: float = 5.0
    kept_max: int = 200
    kept_seconds_max: float = 30 * DAY_SECONDS
    pids_max: int = 32_768
    work_bytes_max: int = 0
    disk_reserve_bytes: int = 128 * MEBIBYTE
    runtime: str = "process"
    users: Mapping[str, str] = field(default_factory=dict)
    shared_identity: bool = False
    hidden: tuple[Path, ...] = ()
    share_machine: bool = True
    machine_parts: int = 1

    def to_json(self) -> str:
        """Write it as one line.

        >>> config = AgentConfig("a", Path("/var/a"), "127.0.0.1:1", cpus=(0, 1), hidden=(Path("/b"),))
        >>> AgentConfig.from_json(config.to_json()) == config
        True
        """
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> AgentConfig:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        values["state_dir"] = Path(values["state_dir"])
        values["hidden"] = tuple(map(Path, values["hidden"]))
        values["cpus"] = None if values["cpus"] is None else tuple(values["cpus"])
        return cls(**values)
