"""The whole command line: all commands with their help and completion, and the global options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from cotenant.cli.lazy import Entry, LazyGroup
from cotenant.cli.outcome import CommandError, ExitCode, print_version, usage_error

JOBS, NODES, MESH, RESEARCH = "Jobs", "Nodes", "The mesh", "Research"
_ENTRIES = (
    ("submit", "jobs.submit", "Submit jobs from files or options.", JOBS),
    ("run", "sessions.run_command", "Run a program in a job and stay with it.", JOBS),
    ("rerun", "jobs.rerun", "Submit jobs again, as new jobs.", JOBS),
    ("jobs", "jobs.list_jobs", "List jobs.", JOBS),
    ("show", "jobs.show", "Show everything about a job.", JOBS),
    ("logs", "jobs.logs", "Print a job's output.", JOBS),
    ("files", "jobs.files", "List the files in a job's working directory.", JOBS),
    ("cp", "jobs.cp", "Copy files out of a job's working directory.", JOBS),
    ("exec", "sessions.exec_command", "Run a command inside a running job.", JOBS),
    ("attach", "sessions.run_command", "Rejoin a job of `run` after the connection was lost.", JOBS),
    ("forward", "sessions.forward", "Forward local ports to a running job.", JOBS),
    ("notebook", "sessions.notebook", "Run JupyterLab in a job and reach it from this machine.", JOBS),
    ("wait", "jobs.wait", "Wait until jobs have ended; exit 0 if all succeeded.", JOBS),
    ("cancel", "jobs.change", "Cancel jobs.", JOBS),
    ("suspend", "jobs.change", "Stop jobs and hold them until they are resumed.", JOBS),
    ("resume", "jobs.change", "Resume suspended jobs.", JOBS),
    ("move", "jobs.change", "Migrate a running job to other nodes.", JOBS),
    ("update", "jobs.update", "Change a job that has not finished.", JOBS),
    ("explain", "jobs.explain", "Explain a job's state and what would change it.", JOBS),
    ("failures", "jobs.failures", "Summarize job failures by class and by who is responsible.", JOBS),
    ("history", "jobs.history", "List archived jobs.", JOBS),
    ("usage", "jobs.usage", "Show the GPU-hours and core-hours that jobs used.", JOBS),
    ("predict", "research.predict", "Predict rates and run times of jobs, with confidence.", JOBS),
    ("whatif", "jobs.whatif", "Simulate a job without submitting it.", JOBS),
    ("schedules", "jobs.schedules", "List, pause, run and delete schedules of `submit --every`.", JOBS),
    ("secrets", "jobs.secrets", "Set, list and delete secrets that jobs use by name.", JOBS),
    ("slurm", "slurm.install", "Install sbatch, squeue and other commands of Slurm.", JOBS),
    ("nodes", "nodes.nodes", "List nodes and their resources, or show one node.", NODES),
    ("drain", "nodes.nodes", "Drain a node: no new work; running jobs are requeued.", NODES),
    ("cordon", "nodes.nodes", "Cordon a node: no new work.", NODES),
    ("uncordon", "nodes.nodes", "Undo a cordon or a drain.", NODES),
    ("release", "nodes.nodes", "Return an unhealthy GPU to service.", NODES),
    ("forget", "nodes.nodes", "Remove a node that is permanently lost.", NODES),
    ("pilots", "pilots.command", "Run agents in jobs of Slurm, as many as the waiting jobs ask for.", NODES),
    ("snapshot", "research.snapshot", "Save the cluster and its jobs for simulations.", NODES),
    ("tenants", "mesh.tenants", "List and change tenants: quotas, limits, weights.", NODES),
    ("incidents", "nodes.incidents", "List contention incidents: victim, suspect, actions, outcome.", NODES),
    ("top", "nodes.top", "Watch the core and GPU usage of nodes and jobs.", NODES),
    ("up", "mesh.up", "Run the whole mesh on this machine.", MESH),
    ("demo", "mesh.demo", "Run the whole mesh with a real mixed workload and write a report.", MESH),
    ("serve", "mesh.serve", "Run one service of the mesh.", MESH),
    ("slurm-bridge", "mesh.slurm_acts", "Prepare Slurm for the bridge, and move running steps on its nodes.", MESH),
    ("backup", "mesh.backup", "Back up the store.", MESH),
    ("restore", "mesh.backup", "Restore a backup into an empty store.", MESH),
    ("migrate", "mesh.backup", "Copy the state to another store while the mesh is stopped.", MESH),
    ("store", "mesh.store", "Check the store, or accept one that lost recent writes.", MESH),
    ("login", "mesh.login", "Keep a mesh and a token for all commands.", MESH),
    ("logout", "mesh.login", "Forget the mesh and the token of `login`.", MESH),
    ("whoami", "mesh.whoami", "Show who you are to the mesh, and how it was found.", MESH),
    ("tokens", "mesh.tokens", "List, create and revoke tokens for people, agents and services.", MESH),
    ("certs", "mesh.certs", "Issue and renew certificates for a lab.", MESH),
    ("audit", "mesh.audit", "Show the audit log: caller, method, target, result.", MESH),
    ("status", "mesh.status", "Show the health of the mesh, its problems and their remedies.", MESH),
    ("health", "mesh.health", "Check that each service is serving.", MESH),
    ("policies", "mesh.policies", "List installed policies and whether they load.", MESH),
    ("executors", "mesh.executors", "Check an executor of your own against the contract.", MESH),
    ("replicas", "mesh.replicas", "List the processes of each service and their leaders.", MESH),
    ("openapi", "mesh.openapi", "Print the OpenAPI document of the API.", MESH),
    ("protos", "mesh.openapi", "Show or copy the protos of the API.", MESH),
    ("plan", "research.plan", "Show what the scheduler would do with a snapshot now.", RESEARCH),
    ("simulate", "research.simulate", "Replay a trace on a simulated cluster.", RESEARCH),
    ("trace", "research.trace", "Summarize a trace or convert it to Cotenant's format.", RESEARCH),
    ("compare", "research.compare", "Compare policies on the same trace and cluster.", RESEARCH),
    (
        "reproduce",
        "research.reproduce",
        "Reproduce results of five papers beside the published ones.",
        RESEARCH,
    ),
    ("replay", "research.replay", "Show a recorded simulation, or verify that it repeats.", RESEARCH),
)
ENTRIES = tuple(Entry(name, f"cotenant.cli.{module}", summary, panel) for name, module, summary, panel in _ENTRIES)

FOREIGN_OPTIONS = {  # as other schedulers or other commands call them
    "--cores": "--cpus", "--cpus-per-task": "--cpus", "--mem": "--memory", "--gres": "--gpus", "--job-name": "--name",
    "--chdir": "--workdir", "--dependency": "--after", "--time-limit": "--time", "--ntasks": "--replicas",
}  # fmt: skip

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # its module depends on typer's version

app = typer.Typer(name="cotenant", cls=LazyGroup, invoke_without_command=True, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
def cotenant(
    context: typer.Context,
    state_dir: Annotated[str, typer.Option(metavar="DIR", help="State directory of `cotenant up`.")] = "",
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the mesh.")] = "",
    token: Annotated[str, typer.Option(metavar="TOKEN", help="Access token.")] = "",
    tls_ca: Annotated[str, typer.Option(metavar="FILE", help="Trusted CA certificates.")] = "",
    tls_cert: Annotated[str, typer.Option(metavar="FILE", help="Client certificate.")] = "",
    tls_key: Annotated[str, typer.Option(metavar="FILE", help="Key of the client certificate.")] = "",
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Schedule deep-learning training, inference and CPU jobs together on one shared GPU cluster.

    Connection settings come from these options, which may follow the command; then from
    COTENANT_STATE_DIR, COTENANT_ENDPOINT, COTENANT_TOKEN and COTENANT_TLS_CA, _CERT and _KEY; then
    from `cotenant login`; then from ~/.config/cotenant/config.toml.

    Exit codes: 0 success, 1 failure, 2 bad usage or input, 3 unreachable, 124 timeout of `wait`.

    \b
    Examples:
      cotenant submit --gpus 1 --wait -- python3 train.py
      cotenant jobs --watch
      cotenant explain ID
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


def invoke(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    Raises:
        CommandError: the arguments are wrong, or the command failed.
    """
    try:
        code = _group().main(list(arguments), prog_name="cotenant", standalone_mode=False)
    except USAGE_ERROR as error:
        raise _usage_error(error) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else ExitCode.DONE


def _group() -> LazyGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    group.add_entries(ENTRIES)
    return group


def _usage_error(error: Exception) -> CommandError:
    """Return typer's usage error as a CommandError."""
    message = str(error.format_message() if hasattr(error, "format_message") else error).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "cotenant"
    given = str(getattr(error, "option_name", ""))
    meant = FOREIGN_OPTIONS.get(given, "")
    if context and any(meant in option.opts for option in context.command.params if meant):
        return usage_error(f"no such option: {given}", hint=f"did you mean {meant}? See `{path} --help`")
    return usage_error(message[:1].lower() + message[1:], hint=f"see `{path} --help`")
