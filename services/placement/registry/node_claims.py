"""Conflicting claims of agents: two agents with one node id, or two nodes that offer the same devices.

A second agent with the id of a node whose agent is connected is refused. Two nodes of one boot of a machine that offer
the same CPUs or GPUs are both admitted, because each may run attempts, but only the one that connected first gets new
work. Both show up as a problem of the node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.errors import Problem
from cotenant.codec.specs import HEALTH_ACTIONS
from cotenant.core.model.node import HealthAction, Inventory
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import shown
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Node
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

REFUSAL_SHOWN_SECONDS = 180.0  # longer than a refused agent waits between two tries
REFUSED_MAX = 1_000
USE_OWN_ID = "give each agent its own node id (--node), or stop the agent that should not run"
USE_OWN_CPUS = (
    "stop one of the agents, or give each its own CPUs (--cpus, up --nodes N); --share-machine offers them twice"
)


@dataclass(slots=True)
class Refusal:
    """Agents that were refused for one node id."""

    address: str
    count: int
    seconds: float  # on the monotonic clock: the last time


class NodeClaims:
    """Detects conflicting claims of agents."""

    def __init__(self, cluster: Cluster, now: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._now = cluster, now
        self._refused: dict[str, Refusal] = {}  # by node id
        self._machine_of: dict[str, str] = {}  # by connected node
        self._machines: dict[str, list[str]] = {}  # connected nodes by boot of their machine, in order of connection

    def refuse(self, hello: agent_pb2.Hello) -> Problem:
        """Record that a second agent said hello with a node's id, and return the error for it."""
        before = self._refused.pop(hello.node_id, None)
        address = hello.inventory.address
        self._refused[hello.node_id] = Refusal(address, before.count + 1 if before else 1, self._now())
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        if before is None:
            log.warning("agent_refused", node=hello.node_id, address=address, why="another agent has this node id")
        return Problem(
            grpc.StatusCode.ALREADY_EXISTS,
            "NODE_EXISTS",
            f"node {shown(hello.node_id)} already has a connected agent: {USE_OWN_ID}",
            metadata={"kind": "node", "id": hello.node_id},
        )

    def connected(self, node: Node) -> None:
        """Record that a node's agent has connected, or has reported its inventory again."""
        machine = node.inventory.machine
        if self._machine_of.get(node.id, machine) != machine:
            self.disconnected(node)
        if machine and node.id not in self._machine_of:
            self._machine_of[node.id] = machine
            self._machines.setdefault(machine, []).append(node.id)
        self._settle(machine)

    def disconnected(self, node: Node) -> None:
        """Record that a node's agent is disconnected."""
        machine = self._machine_of.pop(node.id, "")
        if there := self._machines.get(machine, []):
            there.remove(node.id)
            self._settle(machine)
        if not there:
            self._machines.pop(machine, None)
        node.claim_conflict = ""

    def _settle(self, machine: str) -> None:
        """Find, for each node of a machine, an earlier node that offers the same devices."""
        there = (self._cluster.nodes.get(node_id) for node_id in self._machines.get(machine, ()))
        nodes = [node for node in there if node]
        for place, node in enumerate(nodes):
            rivals = ((one, both) for one in nodes[:place] if (both := overlap(one.inventory, node.inventory)))
            rival, both = next(rivals, (None, ""))
            why = f"it offers {both} that {rival.id} on the same machine offers, which connected first" if rival else ""
            if node.claim_conflict != why:
                node.claim_conflict = why
                log.warning("machine_claim_changed", node=node.id, why=why)
                self._cluster.refresh_open(node)

    def problems(self, node: Node) -> Iterator[resources_pb2.HealthProblem]:
        """Yield the problems of a node's claims."""
        if node.claim_conflict:
            yield resources_pb2.HealthProblem(
                check="machine",
                action=HEALTH_ACTIONS.to_wire(HealthAction.HOLD),
                reason=f"no new work: {node.claim_conflict}",
                remedy=USE_OWN_CPUS,
            )
        refused = self._refused.get(node.id)
        if refused and self._now() - refused.seconds < REFUSAL_SHOWN_SECONDS:
            where = f" at {refused.address}" if refused.address else ""
            times = "once" if refused.count == 1 else f"{refused.count} times"
            yield resources_pb2.HealthProblem(
                check="node_id",
                action=HEALTH_ACTIONS.to_wire(HealthAction.IGNORE),
                reason=f"a second agent with this node id{where} was refused {times}",
                remedy=USE_OWN_ID,
            )


def overlap(one: Inventory, other: Inventory) -> str:
    """Return what two nodes of a machine both offer, as text; "" for nothing. Declared GPUs are not devices.

    >>> from cotenant.core.model.node import Core, Gpu
    >>> left, right = Inventory(cores=(Core(0, (0, 2)),)), Inventory(cores=(Core(1, (1, 2)),), gpus=(Gpu("GPU-a"),))
    >>> overlap(left, right), overlap(left, Inventory(cores=(Core(1, (1, 3)),))), overlap(right, right)
    ('1 CPU', '', '2 CPUs and 1 GPU')
    """
    cpus = len({cpu for core in one.cores for cpu in core.cpus} & {cpu for core in other.cores for cpu in core.cpus})
    gpus = len(
        {gpu.uuid for gpu in one.gpus if not gpu.declared} & {gpu.uuid for gpu in other.gpus if not gpu.declared}
    )
    return " and ".join(plural(count, what) for count, what in ((cpus, "CPU"), (gpus, "GPU")) if count)
