"""Generates src/cotenant/cli/quick_table.py from the declarations of the quick commands: `make docs`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pprint import pformat
from typing import Any, cast
from unittest.mock import patch

from cotenant.cli.application import ENTRIES, invoke
from cotenant.cli.jobs.job_file import read_options
from cotenant.cli.jobs.job_options import document, parameter_name
from cotenant.cli.lazy import TailCommand, load
from cotenant.cli.quick import FLAG, INTEGER, TEXT, TEXTS, QuickContext
from cotenant.core.model.job import SUBMIT_VARIABLES
from cotenant.core.model.job_fields import JOB, REQUEST, ROLE
from cotenant.core.model.limits import PATH_LENGTH_MAX
from cotenant.v1.job_pb2 import JobSpec

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "cotenant" / "cli" / "quick_table.py"
ENTRY = {entry.name: entry for entry in ENTRIES}
QUICK = ("submit", "jobs", "show", "logs", "cancel", "suspend", "resume", "explain", "nodes", "status")

PLAIN_KEYS = (
    "name", "tenant", "queue", "priority", "model", "steps", "expected", "grace", "retries", "workdir", "gpus",
    "gpu_type", "cpus", "memory",
)  # fmt: skip
TEXT_OF_MODULE = '''\
"""How the quick commands are called. Generated from their declarations by `make docs`; do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
COMMANDS: Mapping[str, Mapping[str, Any]] = {rows}

# For a job that is submitted with plain options: the job without options as the client would send it, and for each
# option, by the name of its parameter, the field on the wire and the type of its value.
JOB = {job}
JOB_FIELDS: Mapping[str, tuple[str, str]] = {fields}
SUBMIT_VARIABLES = {variables}
PATH_LENGTH_MAX = {length}
# fmt: on
'''


class Recorded(Exception):
    """Ends a command that was called to see with which values."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given


@contextmanager
def recorded(name: str) -> Iterator[None]:
    """Replace the function of a command by one that raises `Recorded`."""
    module = import_module(ENTRY[name].module)
    function = getattr(module, name)

    def record(**given: Any) -> None:
        raise Recorded(given)

    record.__signature__ = signature = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]  # for typer
    record.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    record.__doc__, record.__name__ = function.__doc__, function.__name__
    with patch.object(module, name, record):
        yield


def typer_values(name: str, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the values with which typer calls the function of a command.

    Raises:
        CommandError: typer refuses the arguments.
    """
    with recorded(name):
        try:
            invoke([name, *arguments])
        except Recorded as call:
            return call.given
    raise AssertionError(f"`{name}` was not called")


def row(name: str) -> dict[str, Any]:
    """Return the row of a command."""
    command = load(ENTRY[name])
    declared = [one for one in command.params if one.name != "help"]
    [argument] = [one for one in declared if one.param_type_name == "argument"] or [None]
    required = ["X"] if argument is not None and argument.required else []
    values = dict(typer_values(name, [*required, "--", "X"] if isinstance(command, TailCommand) else required))
    takes_document = values.pop("job", None) is not None
    defaults = {one.name: values.get(one.name, one.default) for one in declared if one is not argument or not required}
    return {
        "module": ENTRY[name].module,
        "function": name,
        "tail": isinstance(command, TailCommand),
        "document": takes_document,
        "argument": argument and (argument.name, int(argument.required), argument.nargs != 1),
        "defaults": defaults,
        "options": {
            flag: (one.name, *kind)
            for one in declared
            if one is not argument and (kind := kind_of(one))
            for flag in one.opts
        },
    }


def kind_of(option: Any) -> tuple[Any, ...]:
    """Return the kind of an option, and the bounds of a number; () if only typer reads it."""
    if option.is_flag:
        return () if option.secondary_opts else (FLAG,)
    if option.type.name in ("str", "text"):  # its name depends on typer's version
        return (TEXTS if option.multiple else TEXT,)
    if option.type.name.startswith("int") and not option.multiple:
        return INTEGER, getattr(option.type, "min", None), getattr(option.type, "max", None)
    return ()


def table() -> str:
    """Return the text of the module."""
    rows = pformat({name: row(name) for name in QUICK}, width=115, sort_dicts=False)
    return TEXT_OF_MODULE.format(
        rows=rows,
        job=plain_job().SerializeToString(deterministic=True),
        fields=pformat(job_fields(), width=115, sort_dicts=False),
        variables=SUBMIT_VARIABLES,
        length=PATH_LENGTH_MAX,
    )


def plain_job() -> JobSpec:
    """Return the message of a job without options, as the client sends it."""
    draft = read_options(document(cast("Any", QuickContext({}, ["true"])), dict.fromkeys(values_of_options())), 0.0)
    message = draft.to_wire(draft.spec)
    del message.command[:]
    return message


def values_of_options() -> list[str]:
    """Return the parameters of all job options."""
    return [name for name in row("submit")["defaults"] if name.startswith("job_")]


def job_fields() -> dict[str, tuple[str, str]]:
    """Return where the plain options of a job are on the wire, and how their values are written."""
    rows = [(field, field.wire) for field in JOB] + [(field, f"roles.{field.wire}") for field in (*ROLE, *REQUEST)]
    return {parameter_name(field): (wire, field.type.name) for field, wire in rows if field.key in PLAIN_KEYS}


if __name__ == "__main__":
    TABLE.write_text(table())
    print(f"   wrote {TABLE.relative_to(ROOT)}")
