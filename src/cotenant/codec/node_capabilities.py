"""Encodes and decodes what executors can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cotenant.codec.specs import CAPABILITIES, EnumMap
from cotenant.core.model.node_capabilities import (
    EVERYTHING,
    Capability,
    CoreControl,
    NodeCapabilities,
)
from cotenant.core.model.validation import Violation
from cotenant.v1 import node_capabilities_pb2 as pb

if TYPE_CHECKING:
    from cotenant.agent.v1.agent_service_pb2 import Hello
    from cotenant.v1.node_service_pb2 import Node

CORES = EnumMap(CoreControl, pb.CoreControl, "CORE_CONTROL")


def declared(owner: Node | Hello) -> NodeCapabilities:
    """Return the capabilities in a hello or a node; everything if it declares none."""
    if not owner.HasField("capabilities"):
        return EVERYTHING
    return NodeCapabilities(_cores(owner.capabilities), frozenset(_able(owner.capabilities.able)))


def _cores(message: pb.NodeCapabilities) -> CoreControl:
    return CORES.from_wire(message.cores) if message.cores in CORES.names else CoreControl.NONE


def _able(numbers: Iterable[pb.Capability.ValueType]) -> list[Capability]:
    return [CAPABILITIES.from_wire(number) for number in numbers if number in CAPABILITIES.names]


def to_wire(capabilities: NodeCapabilities) -> pb.NodeCapabilities:
    """Encode what an executor can do."""
    able = [CAPABILITIES.to_wire(one) for one in Capability if capabilities.can(one)]
    return pb.NodeCapabilities(cores=CORES.to_wire(capabilities.cores), able=able)


def violations(message: pb.NodeCapabilities, path: str) -> Iterator[Violation]:
    """Yield what contradicts itself in a declaration."""
    cores, able = _cores(message), _able(message.able)
    if pb.CAPABILITY_UNSPECIFIED in message.able:
        yield Violation(f"{path}.able", "lists an unset capability")
    for twice in (one for one in Capability if able.count(one) > 1):
        yield Violation(f"{path}.able", f"lists {twice.value} twice")
    if Capability.PROFILES in able and cores is not CoreControl.RESIZE:
        what = f"lists profiles, which resize the cores of a job, but cores is {cores.value}, not resize"
        yield Violation(f"{path}.able", what)
