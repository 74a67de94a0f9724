"""`cotenant secrets`: values that jobs use by name; they are set and deleted, and never shown again."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.core.model.secrets import VALUE_BYTES_MAX, secret_name_error, value_error
from cotenant.v1.secret_service_pb2 import DeleteSecretRequest, ListSecretsRequest, Secret, SetSecretRequest

STDIN = "-"
PAGE_SIZE = 1000
COLUMNS = (
    Column("SECRET", elastic=True),
    Column("TENANT"),
    Column("SIZE", right=True),
    Column("SET"),
    Column("BY", elastic=True),
)


def complete_secret(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return names of secrets with their tenants, if the mesh is reachable."""
    from cotenant.cli.completion import secret_names
    from cotenant.cli.options import COMPLETION_SECONDS_MAX

    return secret_names(Flags.of(context), incomplete, COMPLETION_SECONDS_MAX)


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Its name: letters, digits and underscores.",
        autocompletion=complete_secret,
        show_default=False,
    ),
]
Tenant = Annotated[str, typer.Option(metavar="TENANT", help="Tenant that it belongs to; default: yours.")]


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(secrets)
    group.command("set")(set_secret)
    group.command("list")(list_secrets)
    group.command("delete")(delete)
    group.command("rotate-key")(rotate_key)
    app.add_typer(group, name="secrets")


def secrets(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the secrets of your tenants, without their values; or set and delete secrets.

    A job gets a secret with `--secret NAME` as the variable NAME, with `--secret NAME=VAR` as VAR, and with
    `--secret NAME:PATH` as the file $COTENANT_SECRETS/PATH, which only its user can read. No command shows a value.

    \b
    Examples:
      cotenant secrets set HF_TOKEN
      cotenant secrets set SSH_KEY --from-file ~/.ssh/id_ed25519
      cotenant submit --secret HF_TOKEN --secret SSH_KEY:ssh/id -- ./train
      cotenant secrets delete HF_TOKEN
    """
    if context.invoked_subcommand is None:
        _list(context, "", as_json)


def list_secrets(context: typer.Context, tenant: Tenant = "", as_json: options.AsJson = False) -> None:
    """List secrets, without their values.

    \b
    Examples:
      cotenant secrets list
      cotenant secrets list --tenant vision --json
    """
    _list(context, tenant, as_json)


def set_secret(
    context: typer.Context,
    name: Name,
    value_from: Annotated[
        str, typer.Argument(metavar="[-]", help="- reads the value from stdin.", show_default=False)
    ] = "",
    from_file: Annotated[
        str, typer.Option("--from-file", metavar="FILE", help="Read the value from this file, or - for stdin.")
    ] = "",
    tenant: Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Set a secret: create it, or replace its value for attempts that start from now on.

    The value comes from a file, as it is; from stdin, where a single line loses its line break; or on a terminal from a
    prompt that does not show it. It is never an argument, which other users of the machine could read.

    \b
    Examples:
      cotenant secrets set HF_TOKEN
      cotenant secrets set HF_TOKEN --from-file token.txt
      pass show wandb | cotenant secrets set WANDB_API_KEY -
    """
    if value_from not in ("", STDIN):
        raise usage_error(
            "a value on the command line could be read by other users of this machine",
            hint=f"cotenant secrets set {name} --from-file FILE, or - for stdin",
        )
    if value_from and from_file not in ("", STDIN):
        raise usage_error("the value comes from stdin or from a file, not both")
    if wrong := secret_name_error(name):
        raise usage_error(f"the name {wrong}")
    value = _value(name, from_file or value_from)
    if wrong := value_error(value):
        raise usage_error(f"the value of {name} {wrong}")
    request = SetSecretRequest(tenant=tenant, name=name, value=value)
    made = with_mesh(Flags.of(context), lambda mesh: mesh.secrets.SetSecret(request)).secret
    if as_json:
        views.print_json(secret_view(made))
    else:
        print(f"{made.name} of tenant {made.tenant} set ({units.short_bytes(made.size_bytes)})")


def delete(context: typer.Context, name: Name, tenant: Tenant = "") -> None:
    """Delete a secret.

    Jobs that name it and have not started wait until it is set again. Jobs that run keep what they have.

    \b
    Example:
      cotenant secrets delete HF_TOKEN
    """
    request = DeleteSecretRequest(tenant=tenant, name=name)
    with_mesh(Flags.of(context), lambda mesh: mesh.secrets.DeleteSecret(request))
    print(f"{name} deleted")


def rotate_key(context: typer.Context) -> None:
    """Add a key to the file of keys in this machine's state directory: it encrypts all secrets from now on.

    The queue encrypts what it keeps again within seconds. Keys of before stay in the file for older backups of the
    store. Replicas of the queue on other machines need a copy of the file first.

    \b
    Example:
      cotenant secrets rotate-key --state-dir /var/lib/cotenant
    """
    from cotenant.security.secret_keys import KEYS_FILE, BadKeys, SecretKeys

    file = SecretKeys(resolve_state_dir(context) / KEYS_FILE)
    try:
        if not file.current():
            raise usage_error(f"{file.path} does not exist", hint="it is made when the first secret is set")
        print(f"{file.rotate()} encrypts from now on")
    except BadKeys as error:
        raise CommandError(str(error)) from None


def _list(context: typer.Context, tenant: str, as_json: bool) -> None:
    async def work(mesh: Mesh) -> list[Secret]:
        return [secret async for secret in all_secrets(mesh, tenant)]

    found = with_mesh(Flags.of(context), work)
    if as_json:
        views.print_json([secret_view(secret) for secret in found])
        return
    rows = [
        (one.name, one.tenant, units.short_bytes(one.size_bytes), views.time_of(one, "update_time") or "-", one.updater)
        for one in found
    ]
    print_table(COLUMNS, rows, nothing="no secrets")


async def all_secrets(mesh: Mesh, tenant: str = "") -> AsyncIterator[Secret]:
    """Yield the secrets that the caller may use, page by page."""
    token = ""
    while True:
        request = ListSecretsRequest(tenant=tenant, page_size=PAGE_SIZE, page_token=token)
        page = await mesh.secrets.ListSecrets(request)
        for secret in page.secrets:
            yield secret
        if not (token := page.next_page_token):
            return


def secret_view(secret: Secret) -> views.View:
    """Return what is known about a secret; its value is not."""
    return {
        "name": secret.name,
        "tenant": secret.tenant,
        "bytes": secret.size_bytes,
        "created": views.time_of(secret, "create_time"),
        "updated": views.time_of(secret, "update_time"),
        "updated_by": secret.updater,
    }


def _value(name: str, source: str) -> bytes:
    """Return the value from a file, from stdin, or from a prompt."""
    if source and source != STDIN:
        try:
            with Path(source).open("rb") as file:
                return file.read(VALUE_BYTES_MAX + 1)
        except OSError as error:
            raise usage_error(f"cannot read {source}: {error.strerror}") from None
    if source == STDIN or not sys.stdin.isatty():
        value = sys.stdin.buffer.read(VALUE_BYTES_MAX + 2)
        return value.removesuffix(b"\n").removesuffix(b"\r") if value.count(b"\n") == 1 else value
    from getpass import getpass

    value = getpass(f"value of {name}: ").encode(errors="surrogateescape")
    if value != getpass("again: ").encode(errors="surrogateescape"):
        raise usage_error("the two values differ")
    return value
