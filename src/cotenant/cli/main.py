"""The entry point of `cotenant`: it runs a command, and turns every failure into one error and an exit code."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence

from cotenant.cli.outcome import (
    CommandError,
    Exit,
    ExitCode,
    OutputClosed,
    is_text,
    print_version,
    show_error,
    unexpected_error,
    usage_error,
)
from cotenant.cli.quick import quick_command
from cotenant.deferred import defer_pure_protobuf
from cotenant.rpc.gc_tuning import THRESHOLDS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack some characters
    gc.set_threshold(*THRESHOLDS)  # what a command imports is no garbage
    code = run(sys.argv[1:] if arguments is None else list(arguments))
    gc.freeze()  # the interpreter need not search what ends with the process
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; every failure becomes one error on stderr."""
    try:
        _check_texts(arguments)
        code = _invoke(arguments)
        sys.stdout.flush()
        return code
    except CommandError as error:
        return _show_and_exit(error)
    except Exit as ended:
        return ended.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except (OutputClosed, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit still writes
        return ExitCode.DONE
    except ModuleNotFoundError as error:
        from cotenant.cli.missing_extras import missing_module

        return _show_and_exit(missing_module(error) or unexpected_error(error))
    except Exception as error:
        return _show_and_exit(unexpected_error(error))


def _invoke(arguments: Sequence[str]) -> int:
    if command := quick_command(arguments, os.environ):
        defer_pure_protobuf()
        command()
        return ExitCode.DONE
    if list(arguments) == ["--version"]:
        print_version()
        return ExitCode.DONE
    from cotenant.cli.application import invoke  # typer takes longer than a whole command

    return invoke(arguments)


def _check_texts(arguments: Sequence[str]) -> None:
    """Reject arguments that are not UTF-8: neither a message nor a terminal can carry them."""
    for index, argument in enumerate(arguments, 1):
        if not is_text(argument):
            raise usage_error(f"argument {index} is not UTF-8 text: {argument!a}")


def _show_and_exit(error: CommandError) -> ExitCode:
    show_error(error)
    return error.code
