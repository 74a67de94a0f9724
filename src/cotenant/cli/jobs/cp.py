"""`cotenant cp`: copy files out of a job's working directory."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.folder_download import Download, target_of
from cotenant.cli.jobs.logs import ATTEMPT_MAX, RANK_MAX
from cotenant.cli.jobs.work_files import Wanted, parse_place, read_parts
from cotenant.cli.outcome import CommandError, note
from cotenant.cli.progress_bar import Bar

QUIET_SECONDS = 1.0  # shorter copies have no progress bar
SHOWN_MAX = 10
MB = 1e6


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cp")(cp)


def cp(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="ID:PATH",
            help="Job and path in its working directory; ID: alone for everything.",
            autocompletion=options.complete_job,
            show_default=False,
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DEST", help="File or folder on this machine.", show_default=False)],
    rank: Annotated[int, typer.Option(metavar="N", min=0, max=RANK_MAX, help="From the node of this rank.")] = 0,
    attempt: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=ATTEMPT_MAX, help="Attempt; default: the last.", show_default=False),
    ] = 0,
) -> None:
    """Copy a file or a folder out of a job's working directory, while it runs and as long as its node keeps it.

    As with cp -r: into DEST if that is a folder, else as DEST. With ID: alone, the content of the whole directory goes
    into DEST. Only of jobs that started in an uploaded folder or in an empty one; others run in a folder of yours.

    Exits with 1 if some of it could not be copied.

    \b
    Examples:
      cotenant cp ID:checkpoints/last.pt .
      cotenant cp ID:out results
      cotenant cp ID: .
      cotenant cp ARRAY_3:metrics.json run-3.json
    """
    job, path = parse_place(source)
    wanted = Wanted(job, path, attempt, rank)
    with closing(Download(target_of(path, target))) as download:
        with_mesh(Flags.of(context), lambda mesh: _copy(mesh, wanted, download))
    if download.problems:
        more = len(download.problems) - SHOWN_MAX
        details = [*download.problems[:SHOWN_MAX], *([f"and {more} more"] if more > 0 else [])]
        raise CommandError(f"copied {_count(download.files)}, but not all", details=details)
    note(f"copied {_count(download.files)}")


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files:,} files"


async def _copy(mesh: Mesh, wanted: Wanted, download: Download) -> None:
    began = time.monotonic()
    with Bar("copying, MB") as bar:
        async for part in read_parts(mesh, wanted):
            download.take(part)
            if time.monotonic() - began > QUIET_SECONDS:
                bar.show(download.bytes / MB, None)
    download.finish()
