"""`cotenant store`: check that the store is the one the mesh wrote, and recover if it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc.aio
import typer

from cotenant.cli import options, views
from cotenant.cli.connection import open_mesh as open_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.replicas import look as look_at_processes
from cotenant.cli.mesh.up import resolve_state_dir
from cotenant.cli.outcome import CommandError, ExitCode, usage_error
from cotenant.cli.render import Column, print_card, print_table
from cotenant.rpc.access import AccessError

if TYPE_CHECKING:
    from cotenant.store.identity_check import Look
    from cotenant.store.witness import RememberedStore

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="sqlite:PATH or etcd://HOST:PORT,…; default: the state directory's store."
    ),
]
STORE_FILE = "cotenant.sqlite"
COLUMNS = (
    Column("WITNESS", elastic=True),
    Column("STORE"),
    Column("GENERATION", right=True),
    Column("REVISION", right=True),
    Column("VERDICT", styled=True),
)


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


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(no_args_is_help=True, help="Check the store, or accept one that lost recent writes.")
    group.command("status")(status)
    group.command("accept-regression")(accept_regression)
    app.add_typer(group, name="store")


def status(context: typer.Context, store: StoreOption = "", as_json: options.AsJson = False) -> None:
    """Show whether the store is trusted.

    Shows the store's identity and revision, and what processes and agents remember of them.

    The exit code is 0 if the store matches their memory, 1 if it is older or a different store, and 3 if neither the
    mesh nor the store can be reached. An SQLite file can only be read while no mesh uses it.

    \b
    Examples:
      cotenant store status
      cotenant store status --store etcd://10.0.0.1:2379 --json
    """
    evidence = asyncio.run(gather_evidence(Flags.of(context), resolve_state_dir(context), store))
    verdicts = dict(_verdicts(evidence))
    wrong = [text for text in verdicts.values() if text]
    if as_json:
        views.print_json(_view(evidence, verdicts))
    else:
        _show(evidence, verdicts)
    if evidence.look is None and not evidence.trusts:
        raise typer.Exit(ExitCode.UNREACHABLE)
    if wrong:
        raise typer.Exit(ExitCode.FAILED)


def accept_regression(
    context: typer.Context,
    store: StoreOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be lost or changed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Accept an older or different store.

    Prefer to restore the right data: stop etcd, restore its newest snapshot or data directory, and start it; or restore
    the SQLite file with its -wal and -witness. The mesh then resumes by itself. Accept the present store only if the
    right data is lost. With etcd, leave a running mesh running: jobs in its memory are written back to the store.
    Attempts that run on this machine's nodes but are missing in the store are adopted. An SQLite file belongs to one
    process: stop `cotenant up` first; jobs keep running.

    \b
    Examples:
      cotenant store accept-regression --dry-run
      cotenant store accept-regression --store etcd://10.0.0.1:2379 --yes
    """
    from cotenant.cli.mesh.store_accepting import RegressionAcceptance

    work = RegressionAcceptance(
        Flags.of(context), resolve_state_dir(context), url_of(resolve_state_dir(context), store)
    )
    asyncio.run(work.run(dry_run=dry_run, ask=not yes, as_json=as_json))


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


def _verdicts(evidence: StoreEvidence) -> Iterator[tuple[str, str]]:
    """Yield each witness and its objection to the store; "" if it has none."""
    from cotenant.store.witness import compare_store

    for one in evidence.trusts:
        yield f"process {one['address']}", one["problem"] or ""
    if evidence.look is None:
        return
    if evidence.look.verdict:
        yield "the store itself", evidence.look.verdict.text
    for witness in evidence.witnesses:
        if verdict := compare_store(witness.memory, evidence.look.seen, witness.name):
            yield witness.name, verdict.text


def _view(evidence: StoreEvidence, verdicts: dict[str, str]) -> dict[str, Any]:
    seen = evidence.look.seen if evidence.look else None
    identity = seen.identity if seen else None
    return {
        "trusted": not any(verdicts.values()),
        "store": {
            "id": identity.id if identity else None,
            "generation": identity.generation if identity else None,
            "revision": seen.revision if seen else None,
            "not_looked_at": evidence.why_not or None,
        },
        "problems": [{"witness": name, "problem": text} for name, text in verdicts.items() if text],
        "witnesses": [
            {
                "name": one.name,
                "store_id": one.memory.id,
                "generation": one.memory.generation,
                "revision": one.memory.revision,
            }
            for one in evidence.witnesses
        ],
    }


def _show(evidence: StoreEvidence, verdicts: dict[str, str]) -> None:
    from cotenant.store.port import StoreDistrusted

    wrong = list(dict.fromkeys(text for text in verdicts.values() if text))
    card = [("verdict", "not trusted; nothing is written" if wrong else "trusted")]
    if evidence.look and (identity := evidence.look.seen.identity):
        card += [("store", identity.id), ("generation", str(identity.generation))]
        card += [("revision", str(evidence.look.seen.revision))]
    elif evidence.why_not:
        card.append(("store", f"not read: {evidence.why_not}"))
    if wrong:  # the other texts differ only in numbers
        card += [("problem", wrong[0]), ("", StoreDistrusted.remedy)]
    print_card(card)
    rows = [
        [
            one.name,
            one.memory.id[:8],
            str(one.memory.generation or "-"),
            str(one.memory.revision or "-"),
            "disagrees" if verdicts.get(one.name) else "agrees",
        ]
        for one in evidence.witnesses
    ]
    print_table(COLUMNS, rows, nothing="no witnesses of this store yet")
