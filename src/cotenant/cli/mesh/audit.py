"""`cotenant audit`: the audit log of this state directory."""

from __future__ import annotations

import glob
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from cotenant.cli import units
from cotenant.cli.annotations import options, typer
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.cli.render import Column, print_table

AUDIT_FILE = "audit.jsonl"  # the name in cotenant.security.audit, whose import would load grpc
LINES_DEFAULT = 50
COLUMNS = (
    Column("TIME"),
    Column("CALLER", elastic=True),
    Column("METHOD"),
    Column("TARGET", elastic=True),
    Column("FROM", elastic=True),
    Column("RESULT"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(audit)


def audit(
    context: typer.Context,
    who: Annotated[str, typer.Option(metavar="NAME", help="Only calls by this caller.")] = "",
    what: Annotated[str, typer.Option(metavar="METHOD", help="Only calls of this method, such as CancelJob.")] = "",
    on: Annotated[str, typer.Option(metavar="ID", help="Only calls on this job, node or tenant.")] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Only calls of the last TIME, such as 2h.")] = "",
    refused: Annotated[bool, typer.Option("--refused", help="Only refused or failed calls.")] = False,
    last: Annotated[int, typer.Option(metavar="N", min=0, help="Show the last N calls; 0: all.")] = LINES_DEFAULT,
    file: Annotated[str, typer.Option(metavar="FILE", help="Audit log; default: the one in the state directory.")] = "",
    as_json: options.AsJson = False,
) -> None:
    """Show the audit log: caller, method, target, origin and result of each call.

    Reads the file to which the servers of this state directory append, readable only by its owner, and its rotated
    files `….1` and so on. A call forwarded from one replica to another appears once if both append to the same file;
    --json shows all lines as they are.

    \b
    Examples:
      cotenant audit --since 1d --who eve
      cotenant audit --refused --json
    """
    path = Path(file) if file else resolve_state_dir(context) / AUDIT_FILE
    try:
        after = time.time() - units.parse_seconds(since) if since else 0.0
    except ValueError as error:
        raise usage_error(f"--since {error}") from None
    found = (
        line
        for line in chain.from_iterable(map(_lines, _files(path)))
        if (not who or line.get("who") == who)
        and (not what or line.get("what") == what)
        and (not on or on in _on(line).split())
        and (not refused or line.get("answer") != "OK")
        and _seconds(line) >= after
    )
    kept = list(deque(found, maxlen=(last if as_json else 2 * last) or None))
    if as_json:
        print(json.dumps(kept, indent=2))
        return
    kept = _calls(kept)[-last:]
    rows = [
        (
            str(line.get("time", ""))[:19],
            str(line.get("who") or "?") + (f" via {line['via']}" if line.get("via") else ""),
            str(line.get("what", "")),
            _on(line),
            str(line.get("from", "")) + (f", to {line['forwarded']}" if line.get("forwarded") else ""),
            str(line.get("reason") or line.get("answer", "")),
        )
        for line in kept
    ]
    print_table(COLUMNS, rows, "no matching calls")


def _calls(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return lines with those of a forwarded call merged: what the leader wrote, with the call's origin.

    >>> served, passed = {"call": "1", "answer": "OK", "from": "b"}, {"call": "1", "forwarded": "l", "from": "a"}
    >>> _calls([served, passed])
    [{'call': '1', 'answer': 'OK', 'from': 'a'}]
    """
    passed = {line["call"]: line.get("from", "") for line in lines if line.get("forwarded") and _call(line)}
    served = {_call(line) for line in lines if not line.get("forwarded")} - {""}
    return [
        {**line, "from": passed[call]} if (call := _call(line)) in passed and not line.get("forwarded") else line
        for line in lines
        if not (line.get("forwarded") and _call(line) in served)
    ]


def _call(line: Mapping[str, Any]) -> str:
    return str(line.get("call") or "")


def _files(path: Path) -> list[Path]:
    """Return a log's files, oldest first."""
    numbers = sorted(
        (int(tail), one)
        for one in path.parent.glob(f"{glob.escape(path.name)}.*")
        if (tail := one.name.removeprefix(f"{path.name}.")).isdecimal()
    )
    return [*(one for _, one in reversed(numbers)), path]


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a log; truncated lines, as after a full disk, are skipped."""
    try:
        with path.open(errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict):
                    yield line
    except FileNotFoundError:
        raise CommandError(
            f"audit log {path} not found", hint="set --state-dir to the servers' state directory"
        ) from None
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None


def _on(line: Mapping[str, Any]) -> str:
    on = line.get("on")
    if not isinstance(on, dict):
        return ""
    return " ".join(str(one) for value in on.values() for one in (value if isinstance(value, list) else [value]))


def _seconds(line: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(line.get("time"))).timestamp()
    except ValueError:
        return 0.0
