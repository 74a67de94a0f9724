"""The settings of an agent that enforcement hooks read, in a module that imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What an agent's settings say about enforcement.

    `pids_max` is the default limit of processes and threads per task; 0 means only the limit of the whole attempt, half
    of the node's. Jobs get scratch space in `scratch_directory`, of the size of its file system; with "" the node has
    none.
    """

    pids_max: int = 32_768
    scratch_directory: str = ""
