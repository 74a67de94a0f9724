"""The settings of an agent, in a module of their own: starting an agent process does not import the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cotenant.node_agent.enforcement.node_settings import NodeSettings
from cotenant.node_agent.probes.outer_job import Nesting

MEBIBYTE = 1 << 20
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class AgentConfig(NodeSettings):
    """The settings of an agent.

    `gpus` is "auto" or "fake:N". `cpus` restricts jobs to these logical CPUs, `memory_bytes` to a part of the memory.
    `address` is the host name by which other nodes reach this one; the default is `node_id`. `shareable_gpus` lets
    several jobs share a GPU; `split_siblings` makes each logical CPU a core of its own. With an empty
    `contention_endpoint` no samples are sent. `memory_bandwidth_peak` is the node's peak memory bandwidth in bytes per
    second; 0 means the highest observed.

    `kept_max` and `kept_seconds_max` bound how many acknowledged attempts keep their output, and for how long.
    `work_bytes_max` limits the size of an attempt's own directory, 0: unlimited. `disk_reserve_bytes` of the file
    system are kept free of jobs' files.

    `folder_cache_bytes` limits the cache of uploaded folders.

    `users` maps submitters to users of the machine if the agent runs as root; the default is the user of the same name.
    An agent that does not run as root runs jobs of several submitters only with `shared_identity`. `hidden` are files
    and directories to hide from jobs where possible, in addition to the state directory. Containers mount only what is
    in one of `container_mounts`; None: whatever their users reach.

    Without `share_machine` the agent refuses to start if another agent of the same user offers some of its CPUs, and
    placement holds one of two such nodes. `machine_parts` is the number of agents that share the machine: each offers
    an equal part of its memory and scratch space.

    `nesting` is set if the agent runs in a job of another system, and stays within what that was given.
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
    work_bytes_max: int = 0
    folder_cache_bytes: int = 10 << 30
    disk_reserve_bytes: int = 128 * MEBIBYTE
    runtime: str = "process"
    users: Mapping[str, str] = field(default_factory=dict)
    shared_identity: bool = False
    hidden: tuple[Path, ...] = ()
    container_mounts: tuple[str, ...] | None = None
    share_machine: bool = True
    machine_parts: int = 1
    nesting: Nesting | None = None

    def to_json(self) -> str:
        """Return the settings as one line of JSON.

        >>> config = AgentConfig("a", Path("/var/a"), "127.0.0.1:1", cpus=(0, 1), hidden=(Path("/b"),))
        >>> AgentConfig.from_json(config.to_json()) == config
        True
        """
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> AgentConfig:
        """Parse what `to_json` wrote."""
        values = json.loads(text)
        values["state_dir"] = Path(values["state_dir"])
        values["hidden"] = tuple(map(Path, values["hidden"]))
        mounts = values.get("container_mounts")
        values["container_mounts"] = None if mounts is None else tuple(mounts)
        values["cpus"] = None if values["cpus"] is None else tuple(values["cpus"])
        nesting = values.get("nesting")
        values["nesting"] = Nesting.from_fields(nesting) if nesting else None
        return cls(**values)
