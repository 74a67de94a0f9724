"""`cotenant slurm`: installs Slurm's commands, which then talk to Cotenant."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.cli.slurm.main import COMMANDS

MARK = "# Installed by `cotenant slurm install`."
EXECUTABLE = 0o755


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(no_args_is_help=True, help=slurm.__doc__)
    group.callback()(slurm)
    group.command("install")(install)
    app.add_typer(group, name="slurm")


def slurm() -> None:
    """Use scripts and programs for Slurm: sbatch, srun, squeue, scancel, sacct, sacctmgr, sinfo, scontrol.

    Install the commands into a folder, and put it first on PATH. They reach the mesh as `cotenant` does, by the
    COTENANT_ variables, the configuration file or the default state directory.

    \b
    Example:
      cotenant slurm install ~/slurm
      export PATH=~/slurm:$PATH
      sbatch train.sh && squeue --me
    """


def install(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the commands; made if it is missing.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files that are not Cotenant's.")] = False,
) -> None:
    """Write Slurm's commands into a folder.

    Put the folder first on PATH, also in programs that start jobs. A second call renews the commands, such as after
    Python or Cotenant were moved.

    \b
    Example:
      cotenant slurm install ~/slurm
    """
    foreign = [name for name in COMMANDS if not force and _is_foreign(folder / name)]
    if foreign:
        raise usage_error(
            f"{folder} has other commands with these names: {', '.join(foreign)}",
            hint="choose another folder, or replace them with --force",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in COMMANDS:
            new = folder / f".{name}.{os.getpid()}"
            new.write_text(program(name))
            new.chmod(EXECUTABLE)
            new.replace(folder / name)
    except OSError as error:
        raise CommandError(f"cannot write to {folder}: {error.strerror}") from None
    where = shlex.quote(str(folder.resolve()))
    print(f"installed {', '.join(COMMANDS)}")
    print(f"use them with: export PATH={where}:$PATH")


def _is_foreign(path: Path) -> bool:
    try:
        return MARK.encode() not in path.read_bytes()[:200]
    except FileNotFoundError:
        return False
    except OSError:
        return True


def program(name: str) -> str:
    """Return the text of a command."""
    code = f'from cotenant.cli.slurm.main import main; main("{name}")'
    return f"#!/bin/sh\n{MARK}\nexec {shlex.quote(sys.executable)} -Pc '{code}' \"$@\"\n"
