"""`cotenant login` and `logout`: the mesh that commands use when nothing else names one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.whoami import caller_view
from cotenant.cli.outcome import CommandError, note, usage_error
from cotenant.rpc.access import Access, AccessError, Sources, is_local, login_file, remove_login, save_login
from cotenant.rpc.endpoints import Endpoints, host_and_port
from cotenant.v1.process_service_pb2 import GetCallerRequest, GetCallerResponse

STDIN = "-"
TOKEN_BYTES_MAX = 64 * 1024
CA_BYTES_MAX = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("login")(login)
    app.command("logout")(logout)


def login(
    context: typer.Context,
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the mesh.", show_default=False)],
    token_file: Annotated[
        str, typer.Option("--token-file", metavar="FILE", help="Read the token from this file, or - for stdin.")
    ] = "",
    ca: Annotated[
        str, typer.Option("--ca", metavar="FILE", help="CA certificates of a mesh with TLS; a copy of them is kept.")
    ] = "",
    fingerprint: Annotated[
        str, typer.Option(metavar="SHA256", help="Refuse other CA certificates than those with this fingerprint.")
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Check a token with the mesh, keep both, and use them for all commands from now on.

    The token comes from a file, from stdin, or on a terminal from a prompt that does not show it. It is kept in
    login.toml beside ~/.config/cotenant/config.toml, readable by you only, and is sent to this address only. Options
    and variables such as COTENANT_ENDPOINT win over it; `cotenant whoami` shows what is used.

    \b
    Examples:
      cotenant login mesh.example.org:7070 --ca ca.pem
      cotenant login 10.0.0.5:7070 --token-file token.txt
      pass show cotenant | cotenant login 10.0.0.5:7070
    """
    try:
        endpoints = Endpoints.parse(address)
    except ValueError as error:
        raise usage_error(f"invalid address: {error}") from None
    authorities = _authorities(ca, fingerprint) if ca or fingerprint else ""
    token = _token(Flags.of(context).token, token_file)
    flags = Flags(endpoint=address, token=token, tls_ca=str(Path(ca).absolute()) if ca else "")
    if not ca and not is_local(host_and_port(endpoints.queue)[0]):
        note("warning: without --ca the token is sent unencrypted")

    async def work(mesh: Mesh) -> GetCallerResponse:
        entry, called, _ = mesh.entries()[0]
        answer: GetCallerResponse = await mesh.process_stub(entry, called).GetCaller(GetCallerRequest())
        return answer

    answer = with_mesh(flags, work)
    try:
        kept = save_login(os.environ, address, token, authorities)
    except AccessError as error:
        raise CommandError(str(error)) from None
    view = caller_view(answer, Access(endpoints, token), Sources(str(kept), str(kept)))
    if as_json:
        views.print_json(view)
        return
    tenants = "all tenants" if view["tenants"] is None else f"tenants {', '.join(view['tenants']) or 'none'}"
    print(f"logged in to {address} as {view['name']} ({', '.join(view['roles']) or 'no roles'}; {tenants})")


def logout(context: typer.Context) -> None:
    """Forget the mesh and the token of `cotenant login`.

    The token stays valid: `cotenant tokens revoke` revokes it.

    \b
    Example:
      cotenant logout
    """
    try:
        forgotten = remove_login(os.environ)
    except AccessError as error:
        raise CommandError(str(error)) from None
    print(f"logged out; {login_file(os.environ)} removed" if forgotten else "not logged in")


def _token(given: str, source: str) -> str:
    """Return the token from an option, a file, stdin or a prompt."""
    if given and source:
        raise usage_error("--token and --token-file contradict each other")
    token = given
    if source and source != STDIN:
        try:
            with Path(source).open("rb") as file:
                token = file.read(TOKEN_BYTES_MAX).decode(errors="replace")
        except OSError as error:
            raise usage_error(f"cannot read {source}: {error.strerror}") from None
    elif source == STDIN or (not given and not sys.stdin.isatty()):
        token = sys.stdin.read(TOKEN_BYTES_MAX)
    elif not given:
        from getpass import getpass

        token = getpass("token: ")
    token = token.strip()
    if not token:
        raise usage_error("the token is empty", hint="an operator makes one: cotenant tokens create --name YOU")
    if not token.isascii() or not token.isprintable():
        raise usage_error("the token contains invalid characters; copy it again")
    return token


def _authorities(path: str, fingerprint: str) -> str:
    """Return the CA certificates of a file, once their fingerprint is confirmed."""
    if not path:
        raise usage_error("--fingerprint needs --ca")
    try:
        with Path(path).open("rb") as file:
            text = file.read(CA_BYTES_MAX).decode("ascii")
        found = fingerprints(text)
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise usage_error(f"{path} has no certificates in PEM") from None
    wanted = fingerprint.replace(":", "").lower()
    for one in found:
        if not fingerprint:
            note(f"trusting the CA certificate with the SHA-256 fingerprint {one}")
        elif one.replace(":", "").lower() != wanted:
            raise usage_error(f"{path} has a certificate with the SHA-256 fingerprint {one}, not {fingerprint}")
    return text


def fingerprints(pem: str) -> list[str]:
    """Return the SHA-256 fingerprints of certificates in PEM.

    Raises:
        ValueError: there are none, or one is damaged.
    """
    import hashlib
    import ssl

    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    parts = [part.partition(end)[0] for part in pem.split(begin)[1:]]
    if not parts:
        raise ValueError("no certificate")
    digests = [hashlib.sha256(ssl.PEM_cert_to_DER_cert(f"{begin}{part}{end}\n")).hexdigest() for part in parts]
    return [":".join(one[at : at + 2] for at in range(0, len(one), 2)).upper() for one in digests]
