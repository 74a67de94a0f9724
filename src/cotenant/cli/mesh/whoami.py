"""`cotenant whoami`: who you are to the mesh, and how it was found."""

from __future__ import annotations

from typing import Any

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, access_and_sources_of, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.units import format_time
from cotenant.codec.specs import seconds
from cotenant.rpc.access import Access, Sources
from cotenant.v1.process_service_pb2 import GetCallerRequest, GetCallerResponse

MESH_TOKEN = "operator"  # noqa: S105 - the name of callers with the mesh's own token


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("whoami")(whoami)


def whoami(context: typer.Context, as_json: options.AsJson = False) -> None:
    """Show your name, roles and tenants as the mesh sees them, and where address and token come from.

    \b
    Examples:
      cotenant whoami
      cotenant whoami --endpoint 10.0.0.5:7070 --json
    """
    flags = Flags.of(context)

    async def work(mesh: Mesh) -> GetCallerResponse:
        address, called, _ = mesh.entries()[0]
        answer: GetCallerResponse = await mesh.process_stub(address, called).GetCaller(GetCallerRequest())
        return answer

    view = caller_view(with_mesh(flags, work), *access_and_sources_of(flags))
    if as_json:
        views.print_json(view)
        return
    expiry = view["expire_time"]
    rows = {
        "name": view["name"],
        "roles": ", ".join(view["roles"]) or "none",
        "tenants": "all" if view["tenants"] is None else ", ".join(view["tenants"]) or "none",
        "mesh": f"{view['endpoint']}, from {view['endpoint_source']}",
        "signed in by": view["credential"],
        "expires": format_time(expiry) if expiry else "never, or unknown",
    }
    for name, text in rows.items():
        print(f"{name:<14}{text}")


def caller_view(answer: GetCallerResponse, access: Access, sources: Sources) -> dict[str, Any]:
    """Return what is known about the caller, as `--json` prints it."""
    certificate = str(access.tls.cert) if access.tls and access.tls.cert else ""
    own = "the mesh's own token" if answer.name == MESH_TOKEN else "a token"
    credential = (
        f"{own}, from {sources.token}" if sources.token else f"the certificate {certificate}" if certificate else ""
    )
    return {
        "name": answer.name,
        "roles": list(answer.roles),
        "tenants": None if answer.all_tenants else list(answer.tenants),
        "endpoint": "|".join(dict.fromkeys(address for address in access.endpoints if address)),
        "endpoint_source": sources.endpoint,
        "credential": credential or "nothing",
        "expire_time": seconds(answer.expire_time) if answer.HasField("expire_time") else None,
    }
