"""`cotenant backup`, `restore` and `migrate`: save the store to a file, restore it, copy it to another store."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.missing_extras import check_extras
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.deferred import asyncio

if TYPE_CHECKING:
    from cotenant.store.backup_file import Contents, Progress
    from cotenant.store.port import Entry
    from cotenant.store.revision_offset import OffsetStore
    from cotenant.store.witness import RememberedStore

T = TypeVar("T")
MAGIC, HEAD_BYTES, APPLICATION_ID = b"SQLite format 3\0", 100, slice(68, 72)  # sqlite.org/fileformat2.html, section 1.3
StoreOption = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="sqlite:PATH or etcd://HOST:PORT,…; default: the state directory's store."
    ),
]
Replace = Annotated[bool, typer.Option("--replace", help="Delete the store's current contents.")]
FilePath = Annotated[Path, typer.Argument(metavar="FILE", help="Backup file.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("backup")(backup)
    app.command("restore")(restore)
    app.command("migrate")(migrate)


def backup(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Backup file; default: named by the current time.")
    ] = None,
    store: StoreOption = "",
    as_json: options.AsJson = False,
) -> None:
    """Save a consistent snapshot of the store: jobs, tenants, nodes, allocations, profiles.

    With etcd, the mesh may keep running. An SQLite file belongs to one process: stop `cotenant up` first. The backup
    contains commands and environments of jobs; only you can read it.

    \b
    Examples:
      cotenant backup
      cotenant backup --store etcd://10.0.0.1:2379,10.0.0.2:2379 nightly.backup
    """
    check_extras("cotenant backup", "server")
    from cotenant.store.backup_file import write_file

    path = file or Path(f"cotenant-{datetime.now(UTC):%Y%m%d-%H%M%S}.backup")
    contents = _run(_read(_urls(context, store)))
    try:
        write_file(contents, path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    _print_result(
        as_json, f"saved {len(contents.entries)} keys at revision {contents.revision} to {path}", contents, path=path
    )


def restore(
    context: typer.Context,
    file: FilePath,
    store: StoreOption = "",
    replace: Replace = False,
    as_json: options.AsJson = False,
) -> None:
    """Restore a backup into a store. Stop all parts of the mesh that use the store first.

    Jobs submitted after the backup are lost; attempts started after it are stopped by their agents. The store's
    revisions continue far above those of the backup, so that agents accept its orders.

    \b
    Examples:
      cotenant restore nightly.backup --store etcd://10.0.0.1:2379
      cotenant restore cotenant-20260102-030405.backup --replace
    """
    check_extras("cotenant restore", "server")
    from cotenant.store.backup_file import BadBackup, read_file

    urls = _urls(context, store, must_exist=False)
    if len(urls) > 1:
        raise usage_error("the state directory has one store file per service; name one store with --store")
    try:
        contents = read_file(file)
    except BadBackup as error:
        raise usage_error(str(error)) from None
    except OSError as error:
        raise usage_error(f"cannot read {file}: {error.strerror}") from None
    revision = _run(_fill(urls[0], contents, replace=replace, known=_known(context)))
    _print_result(
        as_json, f"restored {len(contents.entries)} keys to {urls[0]} at revision {revision}", contents, store=urls[0]
    )


def migrate(
    context: typer.Context,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Target store: etcd://HOST:PORT,…")],
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="URL", help="Source store; repeatable; default: the state directory's."),
    ] = None,
    replace: Replace = False,
    as_json: options.AsJson = False,
) -> None:
    """Copy the state of a stopped mesh to another store; the old store is not changed.

    Running jobs continue. Start the services with the new store afterwards.

    \b
    Examples:
      cotenant migrate --to etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
      cotenant migrate --from sqlite:/var/lib/cotenant/queue.sqlite --to etcd://10.0.0.1:2379
    """
    check_extras("cotenant migrate", "server")
    urls = source or _urls(context, "")
    if to in urls:
        raise usage_error(f"{to} is both source and target")
    contents = _run(_read(urls))
    revision = _run(_fill(to, contents, replace=replace, known=_known(context)))
    text = f"copied {len(contents.entries)} keys from {', '.join(urls)} to {to} at revision {revision}"
    _print_result(as_json, text, contents, store=to)


def _urls(context: typer.Context, store: str, *, must_exist: bool = True) -> list[str]:
    """Return the store URLs: the given one, or the files of the state directory."""
    if store and store != "sqlite":
        return [store]
    state_dir = resolve_state_dir(context)
    if must_exist:
        files = sorted(path for path in state_dir.glob("*.sqlite") if not _is_of_others(path))
        if not files:
            raise usage_error(f"no store in {state_dir}; name one with --store")
        return [f"sqlite:{path}" for path in files]
    return [f"sqlite:{state_dir / 'cotenant.sqlite'}"]


def _is_of_others(path: Path) -> bool:
    """Return whether a file is an SQLite database that is not a store, such as the archive of ended jobs.

    Damaged or unreadable files count as stores, so that opening them reports the error. So do files with a write-ahead
    log, which holds the header of a store while a mesh runs or after it was killed; archives have none between writes.
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
    """Return the contents of several disjoint stores as one."""
    from cotenant.store.backup_file import Contents, read_store

    found: dict[str, bytes] = {}
    revision, named = 0, ("", 0)
    for url in urls:
        async with _opened(url) as store:
            contents = await read_store(store)
        if twice := found.keys() & dict(contents.entries).keys():
            raise usage_error(f"{url} and another source store both hold {min(twice)}")
        found.update(contents.entries)
        revision, named = max(revision, contents.revision), max(named, (contents.store_id, contents.generation))
    return Contents(revision, tuple(sorted(found.items())), *named)


def _known(context: typer.Context) -> list[RememberedStore]:
    """Return the stores that the services of this state directory remember, so that they accept the filled store."""
    from cotenant.store.witness_file import memories_of

    return list(memories_of(resolve_state_dir(context)).values())


async def _fill(url: str, contents: Contents, *, replace: bool, known: Sequence[RememberedStore] = ()) -> int:
    from cotenant.cli.mesh.armed_fail_points import arm_fail_points
    from cotenant.store.backup_file import restore_entries

    arm_fail_points()
    with _bar("keys") as progress:
        async with _opened(url) as store:
            return await restore_entries(
                store, contents, replace=replace, leads=_is_live_leader, progress=progress, known=known
            )


def _is_live_leader(entry: Entry) -> bool:
    """Return whether a leadership key belongs to a live leader.

    A key without an address was left by `cotenant up`, which takes no lease: it does not say whether that still runs.
    """
    from cotenant.leadership.leadership_term import leader_of

    leader = leader_of(entry)
    return leader is not None and bool(leader.address)


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[OffsetStore]:
    from cotenant.store.open import open_raw
    from cotenant.store.revision_offset import OffsetStore

    store = OffsetStore(await open_raw(url))
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Show a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run work on stores; translate their errors for users."""
    from cotenant.store.backup_file import BadBackup, InUse, NotEmpty
    from cotenant.store.port import StoreInUse, StoreUnavailable

    try:
        return asyncio.run(work)
    except ValueError as error:
        if isinstance(error, BadBackup):
            raise CommandError(str(error)) from None
        raise usage_error(str(error)) from None
    except StoreInUse as error:
        raise CommandError(str(error), hint="stop the mesh first; running jobs continue") from None
    except (NotEmpty, InUse) as error:
        raise CommandError(str(error)) from None
    except StoreUnavailable as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None


def _print_result(as_json: bool, text: str, contents: Contents, **more: object) -> None:
    if as_json:
        view = {"keys": len(contents.entries), "revision": contents.revision, "sha256": contents.digest}
        views.print_json(view | {name: str(value) for name, value in more.items()})
    else:
        note(text)
