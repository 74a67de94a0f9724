"""Options and arguments that several commands share, and what a shell completes them with."""

from __future__ import annotations

from typing import Annotated

import typer

from cotenant.cli.flags import Flags

COMPLETION_SECONDS_MAX = 2.0


def complete_job(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer ids of jobs, with their phases and names, where the mesh can be reached."""
    from cotenant.cli.completion import job_ids

    return job_ids(Flags.of(context), incomplete, COMPLETION_SECONDS_MAX)


def complete_node(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer ids of nodes, with their states, where the mesh can be reached."""
    from cotenant.cli.completion import node_ids

    return node_ids(Flags.of(context), incomplete, COMPLETION_SECONDS_MAX)


JobId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The job's id, or the beginning or end of it.",
        autocompletion=complete_job,
        show_default=False,
    ),
]
JobIds = Annotated[
    list[str],
    typer.Argument(
        metavar="ID",
        help="Ids of jobs, or beginnings or ends of them.",
        autocompletion=complete_job,
        show_default=False,
    ),
]
NodeId = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="The node's id, or the beginning or end of it.",
        autocompletion=complete_node,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
