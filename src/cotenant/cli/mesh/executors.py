"""`cotenant executors check`: holds an executor to the laws of the contract."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.deferred import asyncio

if TYPE_CHECKING:
    from cotenant.executor_check.transcript import Finding

SECONDS_MIN, SECONDS_MAX = 1.0, 600.0


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(no_args_is_help=True)
    group.callback()(executors)
    group.command("check")(check)
    app.add_typer(group, name="executors")


def executors() -> None:
    """Programs that run jobs on nodes in place of Cotenant's own agent: see docs/executors.md."""


def check(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="Starts the executor; {endpoint} becomes the address.")
    ],
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Time for each thing that must come.")
    ] = 15.0,
    as_json: options.AsJson = False,
) -> None:
    """Check that an executor keeps the contract between placement and the executors of nodes.

    The command is started several times, with COTENANT_ENDPOINT and COTENANT_TOKEN set, against a scripted placement on
    a free port. It is given small jobs, cut off, and killed. Exit 1 if a law is broken.

    \b
    Examples:
      cotenant executors check -- python3 executor.py node-1 node-1.json
      cotenant executors check -- cotenant serve agent --node try --endpoints {endpoint} --gpus fake:1
    """
    from cotenant.executor_check import transcript

    if not SECONDS_MIN <= timeout <= SECONDS_MAX:
        raise usage_error(f"--timeout: must be from {SECONDS_MIN:g} to {SECONDS_MAX:g} s, not {timeout:g}")
    told = (lambda finding: None) if as_json else _show
    try:
        findings = asyncio.run(transcript.check(command, seconds_max=timeout, told=told))
    except OSError as error:
        raise usage_error(f"cannot start {command[0]}: {(error.strerror or str(error)).lower()}") from None
    if as_json:
        print(json.dumps([_view(finding) for finding in findings], indent=2))
    broken = sum(not finding.holds for finding in findings)
    left = transcript.LAW_COUNT - len(findings)
    if broken:
        untried = f"; {left} were not tried" if left else ""
        raise CommandError(f"{broken} of {len(findings)} laws are broken{untried}", code=ExitCode.FAILED)
    note(f"all {len(findings)} laws hold")


def _show(finding: Finding) -> None:
    print(f"{'ok    ' if finding.holds else 'BROKEN'}  {finding.law}", flush=True)
    if not finding.holds:
        print(f"        {finding.fault}")
        for line in finding.exchanged:
            print(f"        {line}")


def _view(finding: Finding) -> dict[str, object]:
    view: dict[str, object] = {"name": finding.name, "law": finding.law, "holds": finding.holds}
    return view if finding.holds else {**view, "fault": finding.fault, "exchanged": list(finding.exchanged)}
