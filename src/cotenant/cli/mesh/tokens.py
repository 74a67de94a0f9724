"""`cotenant tokens`: tokens for people, agents and services, kept as digests beside the servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from cotenant.cli import options, units
from cotenant.cli.mesh.shared_identity import check_token_for
from cotenant.cli.mesh.up import state_dir_of
from cotenant.cli.outcome import CommandError, note, usage
from cotenant.cli.render import Column, print_table
from cotenant.security.one_user import submits
from cotenant.security.permissions import Role
from cotenant.security.subjects import Bearer, tenants_in_words
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
    """List the tokens that servers with this state directory take; or make and revoke them.

    Servers read the file `tokens.json` of their state directory again within a second of a change. It keeps digests:
    nobody can read a token from it.

    \b
    Examples:
      cotenant tokens create --role user --name eve --tenant vision --expires 90d
      cotenant tokens create --role agent --name gpu1
      cotenant tokens revoke eve
    """
    if context.invoked_subcommand is None:
        _show(_file(context), as_json)


def tokens_list(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the tokens.

    \b
    Example:
      cotenant tokens list --json
    """
    _show(_file(context), as_json)


def create(
    context: typer.Context,
    name: Annotated[str, typer.Option(metavar="NAME", help="Whose it is; an agent's is its node.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help=f"One of {', '.join(Role)}.")] = Role.USER,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant", "--tenants", metavar="TENANT,…", help="Whose jobs concern it; repeatable; '*' for all."
        ),
    ] = None,
    expires: Annotated[str, typer.Option(metavar="TIME", help="After so long, such as 90d; 0: never.")] = "0",
    shared_identity: Annotated[
        bool, typer.Option("--shared-identity", help="Though everybody's jobs run as the user who runs the mesh.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Make a token and print it; it is shown this once.

    A mesh that does not run as root runs every job as one user, and takes tokens of other people who may submit jobs
    only if it was started with --shared-identity.

    \b
    Examples:
      cotenant tokens create --name eve --tenant vision --tenant speech
      cotenant tokens create --role operator --name ann --expires 30d
    """
    try:
        seconds = 0.0 if expires in ("", "0") else units.parse_seconds(expires)
        bearer = Bearer.parse(f"{role}/{name}", ",".join(tenant or ()))
    except ValueError as error:
        raise usage(f"the token cannot be made: {error}") from None
    if submits(bearer.identity.roles) and (
        remark := check_token_for(bearer.name, state_dir_of(context), insist=shared_identity)
    ):
        note(remark)
    with _told():
        made, secret = _file(context).create(bearer, time.time() + seconds if seconds else 0.0)
    if as_json:
        print(json.dumps({**_view(made), "token": secret}, indent=2))
        return
    note(f"the token {made.id} of {bearer}, shown this once; pass it in COTENANT_TOKEN:")
    print(secret)


def revoke(
    context: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID|NAME", help="A token's id, or a name: all of its tokens.")],
) -> None:
    """Revoke tokens.

    Servers let nobody in by them from the next second on.

    \b
    Example:
      cotenant tokens revoke eve
    """
    with _told():
        gone = _file(context).revoke(token)
    if not gone:
        raise usage(f"there is no token {token!r}", hint="`cotenant tokens` lists them")
    for one in gone:
        note(f"revoked {one.id} of {one.bearer}")


def _file(context: typer.Context) -> TokenFile:
    return TokenFile(state_dir_of(context) / TOKENS_FILE)


def _show(file: TokenFile, as_json: bool) -> None:
    with _told():
        known = file.tokens()
    if as_json:
        print(json.dumps([_view(one) for one in known], indent=2))
        return
    rows = [
        (one.id, one.bearer.role, one.bearer.name, tenants_in_words(one.bearer.tenants), _day(one.created), _end(one))
        for one in known
    ]
    print_table(COLUMNS, rows, "there are no tokens but the mesh's own")


def _view(token: Token) -> dict[str, Any]:
    tenants = token.bearer.tenants
    return {
        "id": token.id,
        "role": str(token.bearer.role),
        "name": token.bearer.name,
        "tenants": None if tenants is None else sorted(tenants),
        "created": token.created,
        "expires": token.expires or None,
    }


def _end(token: Token) -> str:
    if not token.expires:
        return "never"
    if token.expired(now := time.time()):
        return "expired"
    return token.runs_out(now) or _day(token.expires)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BadTokens as error:
        raise CommandError(str(error)) from None
