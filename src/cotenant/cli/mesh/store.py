"""`cotenant store`: whether the store is the one that was written, and the way back where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc.aio
import typer

from cotenant.cli import options, views
from cotenant.cli.connection import opened as mesh_opened
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.replicas import look as look_at_processes
from cotenant.cli.mesh.up import state_dir_of
from cotenant.cli.outcome import CommandError, ExitCode, usage
from cotenant.cli.render import Column, print_card, print_table
from cotenant.rpc.access import NoAccess

if TYPE_CHECKING:
    from cotenant.store.identity_check import Look
    from cotenant.store.witness import Memory

StoreOption = Annotated[
    str, typer.Option("--store", metavar="URL", help="sqlite:PATH or etcd://HOST:PORT,…; the state directory's.")
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
    """Somebody who remembers the store: a process, a service's file, or a node's agent."""

    name: str
    memory: Memory


@dataclass(frozen=True, slots=True)
class Known:
    """All that can be found out about a store: what it is, and who remembers what of it."""

    look: Look | None  # None where it could not be looked at
    why_not: str
    witnesses: list[Witness]
    trusts: list[views.View]


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(no_args_is_help=True, help="Check the store, and accept one that went back in time.")
    group.command("status")(status)
    group.command("accept-regression")(accept_regression)
    app.add_typer(group, name="store")


def status(context: typer.Context, store: StoreOption = "", as_json: options.AsJson = False) -> None:
    """Show which store this is, up to where it goes, and what processes and agents remember of it.

    The exit code is 0 if the store is what they remember, 1 if it is older or another one, and 3 if neither the mesh
    nor the store can be asked. An SQLite file can be looked at only while no mesh uses it.

    \b
    Examples:
      cotenant store status
      cotenant store status --store etcd://10.0.0.1:2379 --json
    """
    known = asyncio.run(find_out(Flags.of(context), state_dir_of(context), store))
    verdicts = dict(_verdicts(known))
    wrong = [text for text in verdicts.values() if text]
    if as_json:
        views.print_json(_view(known, verdicts))
    else:
        _show(known, verdicts)
    if known.look is None and not known.trusts:
        raise typer.Exit(ExitCode.UNREACHABLE)
    if wrong:
        raise typer.Exit(ExitCode.FAILED)


def accept_regression(
    context: typer.Context,
    store: StoreOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what is lost or changes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Go on with a store that is older than what was seen of it, or with another one.

    Prefer to put the right data back: stop etcd, restore its newest snapshot or data directory, and start it; or put
    the SQLite file, its -wal and its -witness back. The mesh then goes on by itself. Accept what is there only where
    the right data is gone. With etcd, leave the mesh running if it runs: jobs that it still has in memory are written
    to the store again. Attempts that run on this machine's nodes and that the store lacks are adopted. An SQLite file
    belongs to one process: stop `cotenant up` first; jobs keep running.

    \b
    Examples:
      cotenant store accept-regression --dry-run
      cotenant store accept-regression --store etcd://10.0.0.1:2379 --yes
    """
    from cotenant.cli.mesh.store_accepting import Accepting

    work = Accepting(Flags.of(context), state_dir_of(context), url_of(state_dir_of(context), store))
    asyncio.run(work.run(dry_run=dry_run, ask=not yes, as_json=as_json))


async def find_out(flags: Flags, state_dir: Path, store: str) -> Known:
    """Ask the mesh, the files of the state directory, and the store itself."""
    from cotenant.node_agent.control.epoch_fence import remembered
    from cotenant.store.witness_file import memories_of

    trusts = await _asked(flags)
    look, why_not = await _looked_at(url_of(state_dir, store))
    witnesses = [Witness(f"service {name}", memory) for name, memory in memories_of(state_dir).items()]
    nodes = [(path.parent.name, remembered(path)) for path in sorted((state_dir / "nodes").glob("*/fence.jsonl"))]
    witnesses += [Witness(f"node {name}", memory) for name, memory in nodes if memory]
    for one in trusts:
        witnesses += _of_process(one)
    return Known(look, why_not, list({one.name: one for one in witnesses}.values()), trusts)


def url_of(state_dir: Path, store: str) -> str:
    """Return the store that is meant: the one given, or the file of the state directory."""
    return store if store and store != "sqlite" else f"sqlite:{state_dir / STORE_FILE}"


async def _asked(flags: Flags) -> list[views.View]:
    """Ask the processes of the mesh; none where it does not run, or is not found."""
    try:
        async with mesh_opened(flags) as mesh:
            return (await look_at_processes(mesh)).trusts
    except (NoAccess, CommandError, grpc.aio.AioRpcError):
        return []


async def _looked_at(url: str) -> tuple[Look | None, str]:
    """Look at the store itself; or why that cannot be."""
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
        raise usage(str(error)) from None
    try:
        return await look_at(raw), ""
    except StoreUnavailable as error:
        return None, str(error)
    finally:
        await raw.close()


def _missing(url: str) -> str:
    """Say that there is no such file; "" where there is, or the store is no file. Opening would make it."""
    scheme, _, path = url.partition(":")
    missing = scheme == "sqlite" and not Path(path).exists()
    return f"there is no store at {path}; name one with --store" if missing else ""


def _of_process(told: views.View) -> Iterator[Witness]:
    from cotenant.store.witness import Memory

    yield Witness(f"process {told['address']}", Memory(told["store_id"], told["generation"], told["revision"]))
    for one in told["witnesses"]:
        memory = Memory(one["store_id"], one["generation"] or 0, one["revision"] or 0)
        yield Witness(f"node {one['name']}", memory)


def _verdicts(known: Known) -> Iterator[tuple[str, str]]:
    """Say of each witness what it makes of the store; "" where nothing is wrong."""
    from cotenant.store.witness import judge

    for one in known.trusts:
        yield f"process {one['address']}", one["problem"] or ""
    if known.look is None:
        return
    if known.look.verdict:
        yield "the store itself", known.look.verdict.text
    for witness in known.witnesses:
        if verdict := judge(witness.memory, known.look.seen, witness.name):
            yield witness.name, verdict.text


def _view(known: Known, verdicts: dict[str, str]) -> dict[str, Any]:
    seen = known.look.seen if known.look else None
    identity = seen.identity if seen else None
    return {
        "trusted": not any(verdicts.values()),
        "store": {
            "id": identity.id if identity else None,
            "generation": identity.generation if identity else None,
            "revision": seen.revision if seen else None,
            "not_looked_at": known.why_not or None,
        },
        "problems": [{"witness": name, "problem": text} for name, text in verdicts.items() if text],
        "witnesses": [
            {
                "name": one.name,
                "store_id": one.memory.id,
                "generation": one.memory.generation,
                "revision": one.memory.revision,
            }
            for one in known.witnesses
        ],
    }


def _show(known: Known, verdicts: dict[str, str]) -> None:
    from cotenant.store.port import StoreDistrusted

    wrong = list(dict.fromkeys(text for text in verdicts.values() if text))
    card = [("verdict", "not trusted: nothing is written" if wrong else "trusted")]
    if known.look and (identity := known.look.seen.identity):
        card += [("store", identity.id), ("generation", str(identity.generation))]
        card += [("revision", str(known.look.seen.revision))]
    elif known.why_not:
        card.append(("store", f"not looked at: {known.why_not}"))
    if wrong:  # the others say the same in numbers of their own
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
        for one in known.witnesses
    ]
    print_table(COLUMNS, rows, nothing="nobody remembers this store yet")
