"""Options and arguments shared by commands, with their shell completion."""

from __future__ import annotations

from typing import Annotated

import typer

from cotenant.cli.flags import Flags

COMPLETION_SECONDS_MAX = 2.0


def complete_job(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return ids of jobs with their phases and names, if the mesh is reachable."""
    from cotenant.cli.completion import job_ids

    return job_ids(Flags.of(context), incomplete, COMPLETION_SECONDS_MAX)


def complete_node(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return ids of nodes with their states, if the mesh is reachable."""
    from cotenant.cli.completion import node_ids

    return node_ids(Flags.of(context), incomplete, COMPLETION_SECONDS_MAX)


JobId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Job id, a unique prefix or suffix of it, a name (your newest job), or @last.",
        autocompletion=complete_job,
        show_default=False,
    ),
]
JobIds = Annotated[
    list[str],
    typer.Argument(
        metavar="ID",
        help="Job ids, unique prefixes or suffixes of them, names (your newest job), or @last.",
        autocompletion=complete_job,
        show_default=False,
    ),
]
NodeId = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="Node id, or a unique prefix or suffix of it.",
        autocompletion=complete_node,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason, shown with the node.")]
