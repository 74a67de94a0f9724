"""`cotenant tokens`: access tokens for users, agents and services, stored as digests in the state directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

from cotenant.cli import units
from cotenant.cli.annotations import options, typer
from cotenant.cli.mesh.shared_identity import check_token_for
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.outcome import CommandError, note, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.security.one_user import may_submit
from cotenant.security.permissions import Role
from cotenant.security.subjects import Subject, tenants_text
from cotenant.security.tokens import TOKENS_FILE, BadTokens, Token, TokenFile

COLUMNS = (
    Column("TOKEN"),
    Column("ROLE"),
    Column("NAME", elastic=True),
    Column("TENANTS", elastic=True),
    Column("CREATED"),
    Column("EXPIRES"),
)


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(tokens)
    group.command("create")(create)
    group.command("list")(tokens_list)
    group.command("revoke")(revoke)
    app.add_typer(group, name="tokens")


def tokens(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the tokens that servers with this state directory accept; or create and revoke tokens.

    Servers reload `tokens.json` in their state directory within a second of a change. The file contains only digests of
    tokens.

    \b
    Examples:
      cotenant tokens create --role user --name eve --tenant vision --expires 90d
      cotenant tokens create --role agent --name gpu1
      cotenant tokens revoke eve
    """
    if context.invoked_subcommand is None:
        _show(_file(context), as_json)


def tokens_list(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List tokens.

    \b
    Example:
      cotenant tokens list --json
    """
    _show(_file(context), as_json)


def create(
    context: typer.Context,
    name: Annotated[str, typer.Option(metavar="NAME", help="Owner of the token; for agents, the node.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help=f"One of {', '.join(Role)}.")] = Role.USER,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant",
            "--tenants",
            metavar="TENANT,…",
            help="Tenants whose jobs it may access; repeatable; '*' for all.",
        ),
    ] = None,
    expires: Annotated[str, typer.Option(metavar="TIME", help="Lifetime, such as 90d; 0: never expires.")] = "0",
    shared_identity: Annotated[
        bool, typer.Option("--shared-identity", help="Accept that all jobs run as the mesh's user.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Create a token and print it; it is shown only once.

    A mesh that does not run as root runs every job as one user, and accepts other users' tokens that may submit jobs
    only if it was started with --shared-identity.

    \b
    Examples:
      cotenant tokens create --name eve --tenant vision --tenant speech
      cotenant tokens create --role operator --name ann --expires 30d
    """
    try:
        seconds = 0.0 if expires in ("", "0") else units.parse_seconds(expires)
        subject = Subject.parse(f"{role}/{name}", ",".join(tenant or ()))
    except ValueError as error:
        raise usage_error(f"cannot create the token: {error}") from None
    if may_submit(subject.identity.roles) and (
        warning := check_token_for(subject.name, resolve_state_dir(context), insist=shared_identity)
    ):
        note(warning)
    with _as_command_errors():
        made, secret = _file(context).create(subject, time.time() + seconds if seconds else 0.0)
    if as_json:
        print(json.dumps({**_view(made), "token": secret}, indent=2))
        return
    note(f"created token {made.id} for {subject}, shown only once; pass it in COTENANT_TOKEN:")
    print(secret)


def revoke(
    context: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID|NAME", help="Token id, or a name: revokes all its tokens.")],
) -> None:
    """Revoke tokens.

    Servers reject revoked tokens within a second.

    \b
    Example:
      cotenant tokens revoke eve
    """
    with _as_command_errors():
        gone = _file(context).revoke(token)
    if not gone:
        raise usage_error(f"token {token!r} not found", hint="list tokens with `cotenant tokens`")
    for one in gone:
        note(f"revoked {one.id} of {one.subject}")


def _file(context: typer.Context) -> TokenFile:
    return TokenFile(resolve_state_dir(context) / TOKENS_FILE)


def _show(file: TokenFile, as_json: bool) -> None:
    with _as_command_errors():
        known = file.tokens()
    if as_json:
        print(json.dumps([_view(one) for one in known], indent=2))
        return
    rows = [
        (one.id, one.subject.role, one.subject.name, tenants_text(one.subject.tenants), _day(one.created), _end(one))
        for one in known
    ]
    print_table(COLUMNS, rows, "no tokens besides the mesh's own")


def _view(token: Token) -> dict[str, Any]:
    tenants = token.subject.tenants
    return {
        "id": token.id,
        "role": str(token.subject.role),
        "name": token.subject.name,
        "tenants": None if tenants is None else sorted(tenants),
        "created": token.created,
        "expires": token.expires or None,
    }


def _end(token: Token) -> str:
    if not token.expires:
        return "never"
    if token.expired(now := time.time()):
        return "expired"
    return token.expires_soon(now) or _day(token.expires)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


@contextmanager
def _as_command_errors() -> Iterator[None]:
    try:
        yield
    except BadTokens as error:
        raise CommandError(str(error)) from None
