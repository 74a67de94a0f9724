"""`cotenant slurm-bridge node`: the sidecar of a node of Slurm, which moves running steps to cores that they need."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.outcome import CommandError, note, usage_error
from cotenant.cli.units import parse_seconds

CPUSETS = "cpusets"
TABLE_SECONDS = 10.0  # after which the table is read again
TABLE_BYTES_MAX = 1024 * 1024
SECONDS_MIN = {"--interval": 0.2, "--window": 1.0}


def node(
    act: Annotated[
        str, typer.Option(metavar="cpusets", help="What to change: the cores of running steps. Default: nothing.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be moved, and move nothing.")] = False,
    put_back: Annotated[
        bool, typer.Option("--put-back", help="Put back what an earlier sidecar left, and end.")
    ] = False,
    node_name: Annotated[
        str, typer.Option("--node", metavar="NAME", help="The node in slurm.conf.", show_default="the host's name")
    ] = "",
    cores_table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table of `serve slurm --act cores`: how many cores jobs need."),
    ] = None,
    lend_idle: Annotated[
        bool, typer.Option("--lend-idle", help="Also lend cores that Slurm has given to no job.")
    ] = False,
    interval: Annotated[str, typer.Option(metavar="TIME", help="How often steps are looked at.")] = "1s",
    window: Annotated[str, typer.Option(metavar="TIME", help="How long use is measured first.")] = "30s",
) -> None:
    """Run the sidecar of a Slurm node: running steps get the cores that they need, and no more.

    A job that uses fewer cores than Slurm gave it keeps as many as it needs; jobs with GPUs that use all of theirs may
    use the others. It gets them back as soon as it uses nearly all that it kept, or begins another step. Slurm's own
    control groups and records are not changed. When the sidecar ends, or is killed, everything is put back.

    Needs root, control groups of version 1, and TaskPlugin=task/cgroup with ConstrainCores=yes. See
    docs/slurm-bridge.md.

    \b
    Examples:
      cotenant slurm-bridge node --act cpusets --dry-run
      cotenant slurm-bridge node --act cpusets --cores-table /shared/slurm-cores.table
      cotenant slurm-bridge node --put-back
    """
    from cotenant.node_agent.slurm import sidecar
    from cotenant.node_agent.slurm.step_groups import StepGroups
    from cotenant.node_agent.supervisor.cgroups import GroupError

    if act not in ("", CPUSETS):
        raise usage_error(f"--act must be {CPUSETS}, not {act!r}")
    if not act and not dry_run and not put_back:
        raise usage_error("nothing to do", hint=f"use --act {CPUSETS}, or --dry-run to list what it would move")
    seconds = {"--interval": _seconds("--interval", interval), "--window": _seconds("--window", window)}
    groups = StepGroups(_cpuset_root(), node_name or socket.gethostname().partition(".")[0])
    if not dry_run and os.geteuid() != 0:
        raise CommandError("only root can move the processes of others", hint="run it as root, or with --dry-run")
    config = sidecar.SidecarConfig(
        interval_seconds=seconds["--interval"],
        window_seconds=seconds["--window"],
        lend_idle=lend_idle,
        dry_run=dry_run,
        say=note,
        told=_told_by(cores_table) if cores_table else lambda variables: None,
    )
    try:
        if put_back:
            for path in sidecar.put_back(groups):
                note(f"{path} could not be put back: its processes do not end")
            return
        if not groups.directory.is_dir():
            note(f"{groups.directory} does not exist yet: slurmd makes it for its first job, if it uses cpusets")
        note(f"watching the steps below {groups.directory}")
        sidecar.run(groups, config)
    except sidecar.AnotherRuns as error:
        raise CommandError(str(error), hint="end it first") from None
    except GroupError as error:
        raise CommandError(str(error), hint="a container needs a writable /sys/fs/cgroup/cpuset") from None


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise usage_error(f"{flag} {error}") from None
    if seconds < SECONDS_MIN[flag]:
        raise usage_error(f"{flag} must be {SECONDS_MIN[flag]:g} s or more, not {text}")
    return seconds


def _cpuset_root() -> Path:
    """Return where the cpuset hierarchy of version 1 is mounted."""
    from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts

    for mount in find_mounts():
        if mount.version == 1 and "cpuset" in mount.controllers:
            return Path(mount.root)
    hint = "with version 2, --act cores and --act order of `cotenant serve slurm` work"
    raise CommandError("this machine has no cpuset hierarchy of version 1", hint=hint)


def _told_by(table: Path) -> Callable[[Mapping[str, str]], int | None]:
    """Return a function that finds θ of a job in the table, by the variables that Slurm sets."""
    from cotenant.services.slurm.core_choice import JobKind, found_cpus, kind_in

    known: dict[JobKind, int] = {}
    read_at = float("-inf")

    def told(variables: Mapping[str, str]) -> int | None:
        nonlocal known, read_at
        if time.monotonic() - read_at >= TABLE_SECONDS:
            try:
                with table.open("rb") as file:
                    known = found_cpus(file.read(TABLE_BYTES_MAX).decode(errors="replace"), time.time())
            except OSError:
                known = {}
            read_at = time.monotonic()
        kind = kind_in(variables)
        return known.get(kind) if kind else None

    return told
