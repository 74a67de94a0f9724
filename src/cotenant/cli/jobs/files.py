"""`cotenant files`: list the files in a job's working directory."""

from __future__ import annotations

from typing import Annotated

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.logs import ATTEMPT_MAX, RANK_MAX
from cotenant.cli.jobs.work_files import Wanted, clean_path, parse_place, read_parts, shown
from cotenant.cli.outcome import note
from cotenant.v1.job_pb2 import FILE_KIND_DIRECTORY, FILE_KIND_FILE, FILE_KIND_LINK, FileEntry

KINDS = {FILE_KIND_FILE: "file", FILE_KIND_DIRECTORY: "directory", FILE_KIND_LINK: "link"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("files")(files)


def files(
    context: typer.Context,
    job_id: options.JobId,
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="Only this file or folder.", show_default=False)] = "",
    rank: Annotated[int, typer.Option(metavar="N", min=0, max=RANK_MAX, help="Of the node of this rank.")] = 0,
    attempt: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=ATTEMPT_MAX, help="Attempt; default: the last.", show_default=False),
    ] = 0,
    as_json: options.AsJson = False,
) -> None:
    """List the files in a job's working directory, while it runs and as long as its node keeps them.

    Only of jobs that started in an uploaded folder or in an empty one; others run in a folder of yours.

    \b
    Examples:
      cotenant files ID
      cotenant files ID checkpoints
      cotenant files ARRAY_3 --json
    """
    job, inner = parse_place(job_id) if ":" in job_id else (job_id, b"")
    wanted = Wanted(job, clean_path(path) if path else inner, attempt, rank)
    found, problems = with_mesh(Flags.of(context), lambda mesh: _read(mesh, wanted))
    for problem in problems:
        note(problem)
    if as_json:
        views.print_json([_view(entry, wanted.path) for entry in found])
        return
    for entry in found:
        print(_line(entry, wanted.path))


async def _read(mesh: Mesh, wanted: Wanted) -> tuple[list[FileEntry], list[str]]:
    found, problems = list[FileEntry](), list[str]()
    async for part in read_parts(mesh, wanted, list_only=True):
        if part.HasField("entry"):
            found.append(part.entry)
        if part.problem:
            problems.append(f"{shown(found[-1].path) or '.'}: {part.problem}" if found else part.problem)
    only_directory = found and not found[0].path and found[0].kind == FILE_KIND_DIRECTORY
    return found[1:] if only_directory else found, problems


def _full(entry: FileEntry, base: bytes) -> bytes:
    return b"/".join(part for part in (base, entry.path) if part)


def _view(entry: FileEntry, base: bytes) -> dict[str, object]:
    return {
        "path": _full(entry, base).decode(errors="replace"),
        "kind": KINDS.get(entry.kind, "other"),
        "mode": f"{entry.mode:04o}",
        "size_bytes": entry.size_bytes,
        "modified": entry.modify_time.seconds,
        "link_target": entry.link_target.decode(errors="replace"),
    }


def _line(entry: FileEntry, base: bytes) -> str:
    size = units.short_bytes(entry.size_bytes) if entry.kind == FILE_KIND_FILE else "-"
    ending = "/" if entry.kind == FILE_KIND_DIRECTORY else ""
    target = f" -> {shown(entry.link_target)}" if entry.kind == FILE_KIND_LINK else ""
    when = units.format_time(entry.modify_time.seconds)
    return f"{size:>9}  {when}  {shown(_full(entry, base))}{ending}{target}"
