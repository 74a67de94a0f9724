"""The agent's state directory, which survives the agent: locked by one agent at a time and bound to one node."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cotenant.node_agent.runtime.attempt_directory import find_directories

LOCK, NODE = "agent.lock", "node"


class AgentAlreadyRunning(Exception):
    """Another agent runs on the same state directory."""


class StateNotWritable(OSError):
    """The state directory cannot be written; without it, no attempt would survive the agent."""


class NodeMismatch(Exception):
    """The state directory holds attempts of a node with another id."""


def open_state_directory(state_dir: Path, node_id: str) -> int:
    """Create, lock and claim the state directory; return the descriptor that holds the lock.

    Raises:
        AgentAlreadyRunning: another agent uses it.
        NodeMismatch: it holds attempts of another node, which would never be reported.
        StateNotWritable: it cannot be created or written.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateNotWritable(f"the state directory {state_dir} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _claim(state_dir, node_id)
    except BlockingIOError:
        os.close(descriptor)
        raise AgentAlreadyRunning(f"another agent is running on {state_dir}") from None
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
        raise NodeMismatch(
            f"{state_dir} belongs to node {owner!r} and holds {len(held)} of its attempts, such as {held[0]}: start "
            f"the agent as {owner!r} until they have ended and placement knows, or give {node_id!r} another directory"
        )
    fresh = mark.with_name(NODE + ".new")
    fresh.write_text(node_id + "\n")
    fresh.rename(mark)
