"""`cotenant backup`, `restore` and `migrate`: what the mesh knows, in a file, back, and from one store to another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cotenant.cli import options, views
from cotenant.cli.mesh.up import state_dir_of
from cotenant.cli.outcome import CommandError, ExitCode, note, usage

if TYPE_CHECKING:
    from cotenant.store.backup_file import Contents, Progress
    from cotenant.store.port import Entry
    from cotenant.store.revision_offset import ShiftedStore
    from cotenant.store.witness import Memory

T = TypeVar("T")
MAGIC, HEAD_BYTES, APPLICATION_ID = b"SQLite format 3\0", 100, slice(68, 72)  # sqlite.org/fileformat2.html, section 1.3
StoreOption = Annotated[
    str, typer.Option("--store", metavar="URL", help="sqlite:PATH or etcd://HOST:PORT,…; the state directory's.")
]
Replace = Annotated[bool, typer.Option("--replace", help="Remove what the store holds now.")]
FilePath = Annotated[Path, typer.Argument(metavar="FILE", help="What `cotenant backup` wrote.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("backup")(backup)
    app.command("restore")(restore)
    app.command("migrate")(migrate)


def backup(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Left out: named by the time.")] = None,
    store: StoreOption = "",
    as_json: options.AsJson = False,
) -> None:
    """Save all that the store holds, at one moment: jobs, tenants, nodes, allocations, profiles.

    With etcd the mesh may run on meanwhile. A file of SQLite belongs to one process: end `cotenant up` first.
    Commands and environments of jobs are in the file, which only you can read.

    \b
    Examples:
      cotenant backup
      cotenant backup --store etcd://10.0.0.1:2379,10.0.0.2:2379 nightly.backup
    """
    from cotenant.store.backup_file import write_file

    path = file or Path(f"cotenant-{datetime.now(UTC):%Y%m%d-%H%M%S}.backup")
    contents = _run(_read(_urls(context, store)))
    try:
        write_file(contents, path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    _tell(as_json, f"{len(contents.entries)} keys at revision {contents.revision} are in {path}", contents, path=path)


def restore(
    context: typer.Context,
    file: FilePath,
    store: StoreOption = "",
    replace: Replace = False,
    as_json: options.AsJson = False,
) -> None:
    """Fill a store with what a backup holds. No part of the mesh may run on it meanwhile.

    What was submitted after the backup is lost, and attempts that were started after it are stopped by their agents.
    The store's revisions go on far above those of the backup, so that agents obey.

    \b
    Examples:
      cotenant restore nightly.backup --store etcd://10.0.0.1:2379
      cotenant restore cotenant-20260102-030405.backup --replace
    """
    from cotenant.store.backup_file import BadBackup, read_file

    urls = _urls(context, store, there=False)
    if len(urls) > 1:
        raise usage("the state directory has a file for each service; name one store with --store")
    try:
        contents = read_file(file)
    except BadBackup as error:
        raise usage(str(error)) from None
    except OSError as error:
        raise usage(f"cannot read {file}: {error.strerror}") from None
    goes_on = _run(_fill(urls[0], contents, replace=replace, known=_known(context)))
    _tell(
        as_json, f"{len(contents.entries)} keys are in {urls[0]}, which goes on from {goes_on}", contents, store=urls[0]
    )


def migrate(
    context: typer.Context,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="The store to fill: etcd://HOST:PORT,…")],
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="URL", help="The store to read; repeatable; those of the state directory."),
    ] = None,
    replace: Replace = False,
    as_json: options.AsJson = False,
) -> None:
    """Move the state of a mesh to another store, with the mesh stopped; the old store stays as it is.

    Running jobs run on meanwhile. Afterwards start the services with the new store.

    \b
    Examples:
      cotenant migrate --to etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
      cotenant migrate --from sqlite:/var/lib/cotenant/queue.sqlite --to etcd://10.0.0.1:2379
    """
    urls = source or _urls(context, "")
    if to in urls:
        raise usage(f"{to} is the store to read and the one to fill")
    contents = _run(_read(urls))
    goes_on = _run(_fill(to, contents, replace=replace, known=_known(context)))
    text = f"{len(contents.entries)} keys of {', '.join(urls)} are in {to}, which goes on from {goes_on}"
    _tell(as_json, text, contents, store=to)


def _urls(context: typer.Context, store: str, *, there: bool = True) -> list[str]:
    """Name the stores that are meant: the one given, or the files of the state directory."""
    if store and store != "sqlite":
        return [store]
    state_dir = state_dir_of(context)
    if there:
        files = sorted(path for path in state_dir.glob("*.sqlite") if not _is_of_others(path))
        if not files:
            raise usage(f"there is no store in {state_dir}; name one with --store")
        return [f"sqlite:{path}" for path in files]
    return [f"sqlite:{state_dir / 'cotenant.sqlite'}"]


def _is_of_others(path: Path) -> bool:
    """Whether a file is an SQLite database that never was a store, as the archive of ended jobs is.

    One that is damaged, or cannot be read, is no such file: whoever opens it tells of it. Nor is one with a write-ahead
    log, in which the head of a store is while a mesh runs, or was killed; archives have none between writes.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        log = Path(f"{path}-wal")
        if log.exists() and log.stat().st_size:
            return False
    except OSError:
        return False
    return len(head) == HEAD_BYTES and head.startswith(MAGIC) and not any(head[APPLICATION_ID])


async def _read(urls: Sequence[str]) -> Contents:
    """Read stores that have nothing in common, as one."""
    from cotenant.store.backup_file import Contents, read_store

    found: dict[str, bytes] = {}
    revision, named = 0, ("", 0)
    for url in urls:
        async with _opened(url) as store:
            contents = await read_store(store)
        if twice := found.keys() & dict(contents.entries).keys():
            raise usage(f"{url} holds {min(twice)}, as another of these stores does")
        found.update(contents.entries)
        revision, named = max(revision, contents.revision), max(named, (contents.store_id, contents.generation))
    return Contents(revision, tuple(sorted(found.items())), *named)


def _known(context: typer.Context) -> list[Memory]:
    """Return what the services of this state directory remember: they accept the store that is filled."""
    from cotenant.store.witness_file import memories_of

    return list(memories_of(state_dir_of(context)).values())


async def _fill(url: str, contents: Contents, *, replace: bool, known: Sequence[Memory] = ()) -> int:
    from cotenant.cli.mesh.armed_fail_points import arm_fail_points
    from cotenant.store.backup_file import fill

    arm_fail_points()
    with _bar("keys") as progress:
        async with _opened(url) as store:
            return await fill(store, contents, replace=replace, leads=_leads, progress=progress, known=known)


def _leads(entry: Entry) -> bool:
    """Tell whether a leadership key is that of a process which leads now.

    One without an address was left by `cotenant up`, which takes no lease: it says nothing of whether that still runs.
    """
    from cotenant.leadership.leadership_term import leader_of

    leader = leader_of(entry)
    return leader is not None and bool(leader.address)


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[ShiftedStore]:
    from cotenant.store.open import open_raw
    from cotenant.store.revision_offset import ShiftedStore

    store = ShiftedStore(await open_raw(url))
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Show how far it is, where somebody looks."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Do something with stores; what they refuse is told in a user's words."""
    from cotenant.store.backup_file import BadBackup, InUse, NotEmpty
    from cotenant.store.port import StoreInUse, StoreUnavailable

    try:
        return asyncio.run(work)
    except ValueError as error:
        if isinstance(error, BadBackup):
            raise CommandError(str(error)) from None
        raise usage(str(error)) from None
    except StoreInUse as error:
        raise CommandError(str(error), hint="end the mesh first; running jobs run on") from None
    except (NotEmpty, InUse) as error:
        raise CommandError(str(error)) from None
    except StoreUnavailable as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None


def _tell(as_json: bool, text: str, contents: Contents, **more: object) -> None:
    if as_json:
        told = {"keys": len(contents.entries), "revision": contents.revision, "sha256": contents.digest}
        views.print_json(told | {name: str(value) for name, value in more.items()})
    else:
        note(text)
