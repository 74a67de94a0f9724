"""`cotenant certs`: a small certificate authority for a lab."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli import options
from cotenant.cli.mesh.up import state_dir_of
from cotenant.cli.outcome import CommandError, note, usage
from cotenant.cli.render import Column, print_table
from cotenant.core.model.refusal import plural
from cotenant.rpc.endpoints import MESH_NAME
from cotenant.security.certificates import CA_CERT, CA_DAYS, LEAF_DAYS, Authority, BadCertificate, Issued
from cotenant.security.permissions import Role
from cotenant.security.subjects import Bearer

HERE = ("localhost", "127.0.0.1")
COLUMNS = (
    Column("FILE"),
    Column("BEARER", elastic=True),
    Column("NAMES", elastic=True),
    Column("UNTIL"),
    Column("DAYS", right=True),
    Column("STATE", styled=True),
)
Directory = Annotated[
    str, typer.Option("--dir", metavar="DIR", help="The authority's; `certs` of the state directory.")
]
Days = Annotated[int, typer.Option(metavar="N", help="Valid for so many days.")]


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(certs)
    for command in (init, issue, show, rotate):
        group.command(command.__name__)(command)
    app.add_typer(group, name="certs")


def certs(context: typer.Context) -> None:
    """Make certificates for a lab; ones from elsewhere work as well.

    `init` makes an authority: one directory, whose `ca.key` stays where it is. Each part then gets `ca.pem`, and a
    certificate and key of its own. A certificate says who bears it: agent/NODE, service/NAME, user/NAME and so on.

    \b
    Examples:
      cotenant certs init
      cotenant certs issue service/queue --name head.lab --name 10.0.0.5
      cotenant certs issue agent/gpu1
      cotenant certs issue user/eve --tenant vision,speech --days 90
      cotenant certs show
      cotenant certs rotate agent/gpu1
    """
    if context.invoked_subcommand is None:
        show(context)


def init(context: typer.Context, directory: Directory = "", days: Days = CA_DAYS) -> None:
    """Make an authority.

    \b
    Example:
      cotenant certs init --dir /etc/cotenant/certs
    """
    authority = _authority(context, directory)
    with _told():
        authority.create(days=days)
    note(f"made the authority {authority.cert_path}; its key, ca.key beside it, is to stay on this machine")


def issue(
    context: typer.Context,
    bearer: Annotated[str, typer.Argument(metavar="ROLE/NAME", help=f"The role is one of {', '.join(Role)}.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant", "--tenants", metavar="TENANT,…", help="Whose jobs concern a person; repeatable; '*' for all."
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A DNS name or address by which a service is called; repeatable."),
    ] = None,
    directory: Directory = "",
    days: Days = LEAF_DAYS,
) -> None:
    """Issue a certificate and its key.

    One that the bearer has is replaced; once its files are where they are used, nothing has to be restarted.

    \b
    Examples:
      cotenant certs issue service/placement --name head.lab
      cotenant certs issue user/eve --tenant vision
    """
    try:
        whose = Bearer.parse(bearer, ",".join(tenant or ()))
    except ValueError as error:
        raise usage(f"no certificate can be issued: {error}") from None
    names = [*(name or [socket.getfqdn()]), MESH_NAME, *HERE] if whose.serves else list(name or ())
    with _told():
        made = _authority(context, directory).issue(whose, list(dict.fromkeys(names)), days)
    note(f"issued {made.path} with its key {made.key_path.name}: {made.bearer}, until {made.ends:%Y-%m-%d}")


def show(context: typer.Context, directory: Directory = "", as_json: options.AsJson = False) -> None:
    """Show who bears which certificate, and until when.

    One is due, that is to be renewed, when 30 days are left, or a third of its time where that is less. What the parts
    of a mesh show, which may be older than what lies here, `cotenant status` tells.

    \b
    Example:
      cotenant certs show --json
    """
    authority = _authority(context, directory)
    with _told():
        issued = authority.issued()
    if as_json:
        print(json.dumps([_view(one) for one in issued], indent=2))
        return
    rows = [
        (one.path.name, _bearer(one), ", ".join(one.names), f"{one.ends:%Y-%m-%d}", str(_days_left(one)), _state(one))
        for one in issued
    ]
    print_table(COLUMNS, rows, f"there are no certificates in {authority.directory}; `cotenant certs init` begins")
    due = [one for one in issued if one.validity.is_due(datetime.now(UTC))]
    if any(one.path.name == CA_CERT for one in due):
        note("the authority itself runs out: `cotenant certs rotate --ca` makes a new one; see `certs rotate --help`")
    elif due:
        note(f"{plural(len(due), 'certificate')} to be renewed: `cotenant certs rotate --due`, then copy what it names")


def rotate(
    context: typer.Context,
    bearers: Annotated[list[str] | None, typer.Argument(metavar="ROLE/NAME", help="Whose; all.")] = None,
    due: Annotated[bool, typer.Option("--due", help="Only those that are due, as `show` says.")] = False,
    ca: Annotated[bool, typer.Option("--ca", help="Make a new authority first; the old one is believed too.")] = False,
    forget_old: Annotated[bool, typer.Option("--forget-old", help="Then believe the old authority no more.")] = False,
    directory: Directory = "",
    days: Days = LEAF_DAYS,
) -> None:
    """Issue certificates anew.

    They get new keys, and keep their names. To replace the authority: `rotate --ca`, then copy ca.pem and everybody's
    files to where they are used, and once all have them `rotate --forget-old`, and copy ca.pem again. Nothing is
    restarted meanwhile.

    \b
    Examples:
      cotenant certs rotate
      cotenant certs rotate --due
      cotenant certs rotate agent/gpu1 --days 30
      cotenant certs rotate --ca
    """
    authority = _authority(context, directory)
    with _told():
        if forget_old:
            note(f"{authority.forget_old()} old authorities are believed no more; copy {CA_CERT} to everybody")
            return
        known = [(whose, one) for one in authority.issued()[1:] if (whose := Bearer.of_uri(one.bearer))]
        if missing := set(bearers or ()) - {str(whose) for whose, _ in known}:
            raise usage(
                f"there is no certificate of {', '.join(sorted(missing))}", hint="`cotenant certs show` lists them"
            )
        if ca:
            authority.renew()
            note(f"a new authority signs; copy {CA_CERT} to everybody before anything else")
        now = datetime.now(UTC)
        meant = [
            (whose, one)
            for whose, one in known
            if (not bearers or str(whose) in bearers) and (not due or one.validity.is_due(now))
        ]
        for whose, one in meant:
            made = authority.issue(whose, one.names, days)
            note(f"issued {made.path} anew, until {made.ends:%Y-%m-%d}")
        if due and not meant:
            note("none is due")


def _authority(context: typer.Context, directory: str) -> Authority:
    return Authority(Path(directory).expanduser() if directory else state_dir_of(context) / "certs")


def _bearer(issued: Issued) -> str:
    if issued.path.name == CA_CERT:
        return "(the authority)"
    return issued.bearer.removeprefix("cotenant://") or "(nobody)"


def _state(issued: Issued) -> str:
    """Say in a word whether it can be shown."""
    now = datetime.now(UTC)
    if now > issued.ends:
        return "expired"
    if now < issued.begins:
        return "not yet valid"
    return "due" if issued.validity.is_due(now) else "valid"


def _days_left(issued: Issued) -> int:
    return (issued.ends - datetime.now(UTC)).days


def _view(issued: Issued) -> dict[str, object]:
    return {
        "file": str(issued.path),
        "bearer": issued.bearer,
        "names": list(issued.names),
        "begins": issued.begins.isoformat(),
        "ends": issued.ends.isoformat(),
        "issuer": issued.issuer,
        "state": _state(issued),
    }


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BadCertificate as error:
        raise CommandError(str(error)) from None
