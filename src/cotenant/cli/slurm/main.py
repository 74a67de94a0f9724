"""The entry point of the façade's commands: DIR/sbatch and the others call `main` with their name."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

from cotenant.cli.outcome import CommandError, Exit, print_version
from cotenant.cli.slurm.outcome import FAILED, SlurmError, of_mesh, show
from cotenant.deferred import defer_pure_protobuf

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sacct", "sacctmgr", "sinfo", "scontrol")
VERSION_OPTIONS = ("--version", "-V")


def main(name: str) -> None:
    """Run one of Slurm's commands with the arguments of this process, and exit."""
    defer_pure_protobuf()
    gc.disable()  # what a command imports is no garbage
    code = run(name, sys.argv[1:])
    gc.freeze()  # the interpreter need not search what ends with the process
    sys.exit(code)


def run(name: str, words: list[str]) -> int:
    """Run one of Slurm's commands and return its exit code."""
    try:
        if words[:1] and words[0] in VERSION_OPTIONS:
            print_version()
            return 0
        code: int = import_module(f"cotenant.cli.slurm.{name}").main(words)
        sys.stdout.flush()
        return code
    except SlurmError as error:
        show(name, error)
        return error.code
    except CommandError as error:
        show(name, of_mesh(error, ""))
        return FAILED
    except Exit as ended:
        return int(ended.code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit still writes
        return 0
