"""Encodes and decodes store marks."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.store.witness import REVISION_MAX, Mark, RememberedStore

ID_LENGTH_MAX = 64
SIGNATURE_BYTES_MAX = 64


def mark_to_wire(mark: Mark, supersedes: Sequence[str] = ()) -> agent_pb2.StoreMark:
    """Encode a mark; `supersedes` names the stores that this one replaces."""
    known = mark.memory
    return agent_pb2.StoreMark(
        store_id=known.id,
        generation=known.generation,
        revision=known.revision,
        signature=mark.signature,
        supersedes=supersedes,
        era=known.era,
        era_revision=known.era_revision,
    )


def mark_from_wire(told: agent_pb2.StoreMark) -> Mark | None:
    """Decode a mark; return None if it is invalid."""
    if not 0 < len(told.store_id) <= ID_LENGTH_MAX or len(told.signature) > SIGNATURE_BYTES_MAX:
        return None
    if not 0 < told.generation <= REVISION_MAX or not 0 <= told.revision <= REVISION_MAX:
        return None
    if len(told.era) > ID_LENGTH_MAX or not 0 <= told.era_revision <= REVISION_MAX:
        return None
    memory = RememberedStore(told.store_id, told.generation, told.revision, 0, told.era, told.era_revision)
    return Mark(memory, told.signature)
