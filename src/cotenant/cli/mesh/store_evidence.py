"""The evidence about a store: its identity, and what processes and agents remember of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.cli import views
from cotenant.cli.connection import open_mesh as open_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.replicas import look as look_at_processes
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.deferred import grpc
from cotenant.rpc.access import AccessError

if TYPE_CHECKING:
    from cotenant.store.identity_check import Look
    from cotenant.store.witness import RememberedStore

STORE_FILE = "cotenant.sqlite"


@dataclass(frozen=True, slots=True)
class Witness:
    """A memory of the store's identity: in a process, a service's file, or a node's agent."""

    name: str
    memory: RememberedStore


@dataclass(frozen=True, slots=True)
class StoreEvidence:
    """The evidence about a store: its identity, and what witnesses remember of it."""

    look: Look | None  # None if the store could not be read
    why_not: str
    witnesses: list[Witness]
    trusts: list[views.View]


async def gather_evidence(flags: Flags, state_dir: Path, store: str) -> StoreEvidence:
    """Return evidence from the mesh, the files of the state directory, and the store itself."""
    from cotenant.node_agent.control.epoch_fence import read_store_memory
    from cotenant.store.witness_file import memories_of

    trusts = await _ask_processes(flags)
    look, why_not = await _look(url_of(state_dir, store))
    witnesses = [Witness(f"service {name}", memory) for name, memory in memories_of(state_dir).items()]
    nodes = [
        (path.parent.name, read_store_memory(path)) for path in sorted((state_dir / "nodes").glob("*/fence.jsonl"))
    ]
    witnesses += [Witness(f"node {name}", memory) for name, memory in nodes if memory]
    for one in trusts:
        witnesses += _process_witnesses(one)
    return StoreEvidence(look, why_not, list({one.name: one for one in witnesses}.values()), trusts)


def url_of(state_dir: Path, store: str) -> str:
    """Return the store URL: the given one, or the file of the state directory."""
    return store if store and store != "sqlite" else f"sqlite:{state_dir / STORE_FILE}"


async def _ask_processes(flags: Flags) -> list[views.View]:
    """Return the trust reports of the mesh's processes; none if no mesh is found."""
    try:
        async with open_mesh(flags) as mesh:
            return (await look_at_processes(mesh)).trusts
    except (AccessError, CommandError, grpc.aio.AioRpcError):
        return []


async def _look(url: str) -> tuple[Look | None, str]:
    """Return the store's identity, or why it cannot be read."""
    from cotenant.store.identity_check import look_at
    from cotenant.store.open import open_raw
    from cotenant.store.port import StoreInUse, StoreUnavailable

    if why_not := _missing(url):
        return None, why_not
    try:
        raw = await open_raw(url)
    except StoreInUse:
        return None, "the mesh has the file open"
    except StoreUnavailable as error:
        return None, str(error)
    except ValueError as error:
        raise usage_error(str(error)) from None
    try:
        return await look_at(raw), ""
    except StoreUnavailable as error:
        return None, str(error)
    finally:
        await raw.close()


def _missing(url: str) -> str:
    """Return an error if the store is a missing file; "" otherwise. Opening it would create it."""
    scheme, _, path = url.partition(":")
    missing = scheme == "sqlite" and not Path(path).exists()
    return f"no store at {path}; name one with --store" if missing else ""


def _process_witnesses(process: views.View) -> Iterator[Witness]:
    from cotenant.store.witness import RememberedStore

    yield Witness(
        f"process {process['address']}",
        RememberedStore(process["store_id"], process["generation"], process["revision"]),
    )
    for one in process["witnesses"]:
        memory = RememberedStore(one["store_id"], one["generation"] or 0, one["revision"] or 0)
        yield Witness(f"node {one['name']}", memory)
