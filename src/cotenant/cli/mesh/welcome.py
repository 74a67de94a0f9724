"""What `cotenant up` prints once the mesh is up: lines for a log, or a text for a user at a terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotenant.cli.mesh.embedded import MeshConfig
    from cotenant.v1.node_service_pb2 import Node

LEVEL_AT_TERMINAL = "warning"  # a user reads the text below, not events


class LogFormat(StrEnum):
    """How log lines are written."""

    JSON = "json"
    TEXT = "text"


def set_up_logs(log_format: LogFormat | None) -> bool:
    """Prepare the environment of this process and its agents, and return whether a user reads at a terminal.

    Without a format, a terminal shows only warnings unless COTENANT_LOG is set.
    """
    from cotenant.telemetry.logs import FORMAT_VARIABLE

    if log_format is not None:
        os.environ[FORMAT_VARIABLE] = log_format.value
    at_terminal = log_format is None and sys.stderr.isatty() and not os.environ.get(FORMAT_VARIABLE)
    if at_terminal and not os.environ.get("COTENANT_LOG"):
        os.environ["COTENANT_LOG"] = LEVEL_AT_TERMINAL
        return True
    return False


def log_lines(config: MeshConfig, address: str, nodes: Sequence[Node], options: str, warning: str) -> Iterator[str]:
    """Yield the lines for a log. `options` select the mesh in other commands; `warning` is about its disk."""
    for node in nodes:
        yield f"node {node.id}: {resources(node)}"
        yield from (f"  not enforced here: {sentence}" for sentence in node.inventory.not_enforced)
    if warning:
        yield warning
    yield f"the mesh is up at {address}; its state is in {config.state_dir}"
    yield f"try: {first_job(nodes, options)}"


def terminal_lines(
    config: MeshConfig, address: str, nodes: Sequence[Node], options: str, warning: str
) -> Iterator[str]:
    """Yield the text for a terminal: what runs where, how to submit a first job, how to stop."""
    yield f"The mesh is up at {address}."
    yield ""
    for node in nodes:
        yield f"  node       {node.id}: {resources(node)}"
    sentences = dict.fromkeys(sentence for node in nodes for sentence in node.inventory.not_enforced)
    yield from (f"             not enforced: {sentence}" for sentence in sentences)  # mostly the same on all nodes
    yield f"  queue      {config.queue}"
    yield f"  placement  {config.placement}, cores by {config.allocator}"
    yield f"  predictor  {', '.join(config.predictors)}"
    yield f"  contention {config.contention}"
    yield f"  state      {config.state_dir}"
    if warning:
        yield f"  disk       {warning}"
    yield ""
    yield "In another terminal:"
    yield f"  {first_job(nodes, options)}"
    yield f"  cotenant jobs{options} --watch    what runs and what waits"
    yield f"  cotenant status{options}          problems and their remedies"
    yield ""
    yield "Ctrl-C stops the mesh; jobs keep running, and the next `cotenant up` finds them."
    yield "Warnings appear here; `cotenant up --log-format text` shows all events."


def resources(node: Node) -> str:
    """Return a node's GPUs and cores as text."""
    gpus = len(node.inventory.gpus)
    kind = "declared GPUs" if any(gpu.declared for gpu in node.inventory.gpus) else "GPUs"
    return f"{gpus} {kind}, {len(node.inventory.cores)} cores"


def first_job(nodes: Sequence[Node], options: str) -> str:
    """Return a command that submits a job which can run on these nodes."""
    needs = "--gpus 1" if any(node.inventory.gpus for node in nodes) else "--cpus 1"
    return f"cotenant submit{options} {needs} --wait -- python3 -c 'print(42)'"


def options_for(state_dir: Path, default: Path) -> str:
    """Return the options by which other commands find the mesh; "" if it has the default state directory.

    >>> options_for(Path("/s"), Path("/s")), options_for(Path("/my state"), Path("/s"))
    ('', " --state-dir '/my state'")
    """
    return "" if state_dir == default else f" --state-dir {shlex.quote(str(state_dir))}"
