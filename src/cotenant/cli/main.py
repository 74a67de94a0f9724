"""The entry point: which commands there are, the options of all of them, and how every one ends."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cotenant.cli.lazy import Entry, LazyGroup, ReaderGone
from cotenant.cli.outcome import CommandError, ExitCode, is_text, show_error, surprise, usage

JOBS, NODES, MESH, RESEARCH = "Jobs", "Nodes", "The mesh", "Research"
_ENTRIES = (
    ("submit", "submit", "Submit jobs from a file, or one from options.", JOBS),
    ("jobs", "jobs", "List jobs.", JOBS),
    ("show", "show", "Show all that is known of a job.", JOBS),
    ("logs", "logs", "Print a job's output.", JOBS),
    ("cancel", "change", "End jobs.", JOBS),
    ("suspend", "change", "Stop jobs and hold them back until they are resumed.", JOBS),
    ("resume", "change", "Let suspended jobs queue again.", JOBS),
    ("move", "change", "Let a running job go on elsewhere.", JOBS),
    ("update", "change", "Change a job that has not ended.", JOBS),
    ("explain", "explain", "Tell why a job stands where it stands, and what would change it.", JOBS),
    ("failures", "failures", "Sum up how jobs fail, and whose matter that is.", JOBS),
    ("history", "history", "List jobs that the mesh no longer keeps.", JOBS),
    ("predict", "predict", "Tell how fast and how long jobs run, and how sure that is.", JOBS),
    ("whatif", "whatif", "Tell what would happen to a job, without submitting it.", JOBS),
    ("nodes", "nodes", "List nodes, what they have and what of it is free.", NODES),
    ("drain", "nodes", "Empty a node: no new work, and what runs there is queued again.", NODES),
    ("cordon", "nodes", "Give a node no new work.", NODES),
    ("uncordon", "nodes", "Take back a cordon or a drain.", NODES),
    ("release", "nodes", "Give a GPU that was not well back to work.", NODES),
    ("forget", "nodes", "Take a node that will not come back as gone.", NODES),
    ("snapshot", "snapshot", "Save the cluster and its jobs as they are, to be simulated from there.", NODES),
    ("tenants", "tenants", "List tenants, their guarantees and limits, and change them.", NODES),
    ("incidents", "incidents", "List who slowed whom on a node, and what was done about it.", NODES),
    ("top", "top", "Watch nodes and jobs, with the cores that they use.", NODES),
    ("up", "up", "Run the whole mesh on this machine.", MESH),
    ("demo", "demo", "Run the whole mesh with a real mixed workload, and report on it.", MESH),
    ("serve", "serve", "Run one service of the mesh.", MESH),
    ("backup", "backup", "Save all that the store holds.", MESH),
    ("restore", "backup", "Fill a store with what a backup holds.", MESH),
    ("migrate", "backup", "Move the state to another store, with the mesh stopped.", MESH),
    ("store", "store", "Check the store, and accept one that went back in time.", MESH),
    ("tokens", "tokens", "List, make and revoke tokens for people, agents and services.", MESH),
    ("certs", "certs", "Make certificates for a lab, and renew them.", MESH),
    ("audit", "audit", "Show who did what, on what, from where.", MESH),
    ("status", "status", "Tell how the whole mesh is, what is wrong with it, and what helps.", MESH),
    ("health", "health", "Ask each service whether it can do its work.", MESH),
    ("policies", "policies", "List installed policies, and which of them work.", MESH),
    ("replicas", "replicas", "List the processes of each service, and which of them leads.", MESH),
    ("simulate", "simulate", "Replay a trace on a simulated cluster.", RESEARCH),
    ("trace", "trace", "Sum up a trace, or write it in our own format.", RESEARCH),
    ("compare", "compare", "Compare policies on the same trace and cluster.", RESEARCH),
    ("reproduce", "reproduce", "Measure again what five papers report, ours beside theirs.", RESEARCH),
    ("replay", "replay", "Show what happened in a recorded simulation, or check it.", RESEARCH),
)
ENTRIES = tuple(Entry(name, f"cotenant.cli.{module}", summary, panel) for name, module, summary, panel in _ENTRIES)

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # typer's versions differ in where it is to be found

app = typer.Typer(name="cotenant", cls=LazyGroup, invoke_without_command=True, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # slow to import, and rarely needed

        print(f"cotenant {metadata.version('cotenant')}")
        raise typer.Exit


@app.callback()
def cotenant(
    context: typer.Context,
    state_dir: Annotated[str, typer.Option(metavar="DIR", help="Where `cotenant up` keeps its state.")] = "",
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="The mesh to talk to, instead.")] = "",
    token: Annotated[str, typer.Option(metavar="TOKEN", help="The token that it asks for.")] = "",
    tls_ca: Annotated[str, typer.Option(metavar="FILE", help="The authorities whose certificates are believed.")] = "",
    tls_cert: Annotated[str, typer.Option(metavar="FILE", help="The certificate to show.")] = "",
    tls_key: Annotated[str, typer.Option(metavar="FILE", help="Its key.")] = "",
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Schedule deep-learning training, inference and CPU jobs together on one shared GPU cluster.

    What to reach is looked for in these options, which may also stand behind the command; then in
    COTENANT_STATE_DIR, COTENANT_ENDPOINT, COTENANT_TOKEN and COTENANT_TLS_CA, _CERT and _KEY; then in
    ~/.config/cotenant/config.toml.

    Exit codes: 0 done, 1 the thing failed, 2 bad usage or input, 3 not reachable.

    \b
    Examples:
      cotenant submit --gpus 1 --wait -- python3 train.py
      cotenant jobs --watch
      cotenant explain ID
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; whatever goes wrong becomes one error on stderr."""
    try:
        _check_texts(arguments)
        code = _group().main(list(arguments), prog_name="cotenant", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else ExitCode.DONE
    except CommandError as error:
        return _ended(error)
    except USAGE_ERROR as error:
        return _ended(_misused(error))
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except (ReaderGone, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit has somewhere to go
        return ExitCode.DONE
    except Exception as error:
        return _ended(surprise(error))


def _check_texts(arguments: Sequence[str]) -> None:
    """Refuse bytes that are no text: neither a message nor a terminal can carry them."""
    for index, argument in enumerate(arguments, 1):
        if not is_text(argument):
            raise usage(f"argument {index} is no UTF-8 text: {argument!a}")


def _group() -> LazyGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    group.add_entries(ENTRIES)
    return group


def _ended(error: CommandError) -> ExitCode:
    show_error(error)
    return error.code


def _misused(error: Exception) -> CommandError:
    """Put typer's words for bad usage into ours."""
    told = str(error.format_message() if hasattr(error, "format_message") else error).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "cotenant"
    return usage(told[:1].lower() + told[1:], hint=f"`{path} --help` tells more")
