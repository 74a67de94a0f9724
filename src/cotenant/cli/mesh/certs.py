"""`cotenant certs`: a small certificate authority for labs."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.outcome import CommandError, note, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.core.model.refusal import plural
from cotenant.rpc.endpoints import MESH_NAME
from cotenant.security.permissions import Role
from cotenant.security.subjects import Subject
from cotenant.security.validity import CA_DAYS, LEAF_DAYS

if TYPE_CHECKING:  # needs the extra `server`; `--help` does not
    from cotenant.security.certificates import Authority, Issued

HERE = ("localhost", "127.0.0.1")
COLUMNS = (
    Column("FILE"),
    Column("SUBJECT", elastic=True),
    Column("NAMES", elastic=True),
    Column("EXPIRES"),
    Column("DAYS LEFT", right=True),
    Column("STATE", styled=True),
)
Directory = Annotated[
    str,
    typer.Option("--dir", metavar="DIR", help="Directory of the authority; default: `certs` in the state directory."),
]
Days = Annotated[int, typer.Option(metavar="N", help="Days of validity.")]


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(certs)
    for command in (init, issue, show, rotate):
        group.command(command.__name__)(command)
    app.add_typer(group, name="certs")


def certs(context: typer.Context) -> None:
    """Issue certificates for a lab; certificates from other authorities work as well.

    `init` creates an authority in one directory, whose `ca.key` must stay there. Each part of the mesh then gets
    `ca.pem` and its own certificate and key. A certificate names its subject: agent/NODE, service/NAME, user/NAME
    and so on.

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
    """Create an authority.

    \b
    Example:
      cotenant certs init --dir /etc/cotenant/certs
    """
    authority = _authority(context, directory)
    with _as_command_errors():
        authority.create(days=days)
    note(f"created the authority {authority.cert_path}; keep its key, ca.key next to it, on this machine")


def issue(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(metavar="ROLE/NAME", help=f"Subject; roles: {', '.join(Role)}.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant",
            "--tenants",
            metavar="TENANT,…",
            help="Tenants whose jobs a user may access; repeatable; '*' for all.",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="DNS name or address of a service; repeatable."),
    ] = None,
    directory: Directory = "",
    days: Days = LEAF_DAYS,
) -> None:
    """Issue a certificate and its key.

    An existing certificate of the subject is replaced; processes load new files without a restart.

    \b
    Examples:
      cotenant certs issue service/placement --name head.lab
      cotenant certs issue user/eve --tenant vision
    """
    try:
        owner = Subject.parse(subject, ",".join(tenant or ()))
    except ValueError as error:
        raise usage_error(f"cannot issue a certificate: {error}") from None
    names = [*(name or [socket.getfqdn()]), MESH_NAME, *HERE] if owner.serves else list(name or ())
    with _as_command_errors():
        made = _authority(context, directory).issue(owner, list(dict.fromkeys(names)), days)
    note(f"issued {made.path} with its key {made.key_path.name}: {made.subject}, valid until {made.ends:%Y-%m-%d}")


def show(context: typer.Context, directory: Directory = "", as_json: options.AsJson = False) -> None:
    """List certificates with their subjects and expiry.

    A certificate is due for renewal 30 days before it expires, or in the last third of its validity if that is
    shorter. `cotenant status` shows the certificates in use, which may be older than these files.

    \b
    Example:
      cotenant certs show --json
    """
    authority = _authority(context, directory)
    with _as_command_errors():
        issued = authority.issued()
    if as_json:
        print(json.dumps([_view(one) for one in issued], indent=2))
        return
    rows = [
        (one.path.name, _bearer(one), ", ".join(one.names), f"{one.ends:%Y-%m-%d}", str(_days_left(one)), _state(one))
        for one in issued
    ]
    print_table(COLUMNS, rows, f"no certificates in {authority.directory}; start with `cotenant certs init`")
    due = [one for one in issued if one.validity.is_due(datetime.now(UTC))]
    if any(_is_authority(one) for one in due):
        note("the authority itself expires: replace it with `cotenant certs rotate --ca`; see `certs rotate --help`")
    elif due:
        note(f"{plural(len(due), 'certificate')} due: run `cotenant certs rotate --due`, then copy the files it names")


def rotate(
    context: typer.Context,
    bearers: Annotated[list[str] | None, typer.Argument(metavar="ROLE/NAME", help="Subjects; default: all.")] = None,
    due: Annotated[bool, typer.Option("--due", help="Only certificates due for renewal.")] = False,
    ca: Annotated[bool, typer.Option("--ca", help="Create a new authority first; the old one stays trusted.")] = False,
    forget_old: Annotated[bool, typer.Option("--forget-old", help="Stop trusting old authorities.")] = False,
    directory: Directory = "",
    days: Days = LEAF_DAYS,
) -> None:
    """Renew certificates, with new keys and the same names.

    To replace the authority: run `rotate --ca`, copy ca.pem and all certificates and keys to where they are used, then
    run `rotate --forget-old` and copy ca.pem again. Nothing needs a restart.

    \b
    Examples:
      cotenant certs rotate
      cotenant certs rotate --due
      cotenant certs rotate agent/gpu1 --days 30
      cotenant certs rotate --ca
    """
    authority = _authority(context, directory)
    with _as_command_errors():
        if forget_old:
            count = authority.forget_old()
            note(f"{count} old authorities are no longer trusted; copy {authority.cert_path.name} to all machines")
            return
        known = [(owner, one) for one in authority.issued()[1:] if (owner := Subject.of_uri(one.subject))]
        if missing := set(bearers or ()) - {str(owner) for owner, _ in known}:
            raise usage_error(
                f"no certificate for {', '.join(sorted(missing))}", hint="list certificates with `cotenant certs show`"
            )
        if ca:
            authority.renew()
            note(f"created a new authority; copy {authority.cert_path.name} to all machines first")
        now = datetime.now(UTC)
        selected = [
            (owner, one)
            for owner, one in known
            if (not bearers or str(owner) in bearers) and (not due or one.validity.is_due(now))
        ]
        for owner, one in selected:
            made = authority.issue(owner, one.names, days)
            note(f"renewed {made.path}, valid until {made.ends:%Y-%m-%d}")
        if due and not selected:
            note("no certificate is due")


def _authority(context: typer.Context, directory: str) -> Authority:
    from cotenant.security.certificates import Authority

    return Authority(Path(directory).expanduser() if directory else resolve_state_dir(context) / "certs")


def _is_authority(issued: Issued) -> bool:
    from cotenant.security.certificates import CA_CERT

    return issued.path.name == CA_CERT


def _bearer(issued: Issued) -> str:
    if _is_authority(issued):
        return "(the authority)"
    return issued.subject.removeprefix("cotenant://") or "(none)"


def _state(issued: Issued) -> str:
    """Return the state of a certificate: valid, due, expired or not yet valid."""
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
        "bearer": issued.subject,
        "names": list(issued.names),
        "begins": issued.begins.isoformat(),
        "ends": issued.ends.isoformat(),
        "issuer": issued.issuer,
        "state": _state(issued),
    }


@contextmanager
def _as_command_errors() -> Iterator[None]:
    from cotenant.security.certificates import BadCertificate

    try:
        yield
    except BadCertificate as error:
        raise CommandError(str(error)) from None
