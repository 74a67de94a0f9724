"""The directory in which an agent keeps all that must outlive it: held by one agent at a time, and of one node only."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cotenant.node_agent.runtime.attempt_directory import find_directories

LOCK, NODE = "agent.lock", "node"


class AnotherAgent(Exception):
    """A second agent was started on the same state directory."""


class AnotherNode(Exception):
    """The state directory holds attempts of a node with another id."""


def open_state_directory(state_dir: Path, node_id: str) -> int:
    """Make it, hold it against a second agent, and note whose it is; returns what to close.

    Raises:
        AnotherAgent: it is in use.
        AnotherNode: attempts of another node lie there, which nobody would report any more.
        OSError: it cannot be made or written.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _claim(state_dir, node_id)
    except BlockingIOError:
        os.close(descriptor)
        raise AnotherAgent(f"another agent is running on {state_dir}") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _claim(state_dir: Path, node_id: str) -> None:
    mark, attempts = state_dir / NODE, state_dir / "attempts"
    owner = mark.read_text(errors="replace").strip() if mark.exists() else ""
    if owner == node_id:
        return
    held = [directory.path.name for directory in find_directories(attempts)] if attempts.is_dir() else []
    if owner and held:
        raise AnotherNode(
            f"{state_dir} is the state of node {owner!r} with {len(held)} attempts of it, such as {held[0]}: start the "
            f"agent as {owner!r} until they have ended and placement knows, or give {node_id!r} another directory"
        )
    fresh = mark.with_name(NODE + ".new")
    fresh.write_text(node_id + "\n")
    fresh.rename(mark)
