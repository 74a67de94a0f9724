"""`cotenant tenants`: what tenants are guaranteed, what they may hold and what they do hold."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any

import typer
from google.protobuf.field_mask_pb2 import FieldMask

from cotenant.cli import options, units, views
from cotenant.cli.connection import Mesh, reach
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import usage
from cotenant.cli.render import Column, print_table
from cotenant.cli.shared_options import takes
from cotenant.v1.tenant_service_pb2 import (
    CreateTenantRequest,
    DeleteTenantRequest,
    ListTenantsRequest,
    Tenant,
    UpdateTenantRequest,
)

NONE = "none"
PAGE_SIZE = 1000

COLUMNS = (
    Column("TENANT", elastic=True),
    Column("GPUS", right=True),
    Column("QUOTA", right=True),
    Column("LIMIT", right=True),
    Column("CORES", right=True),
    Column("QUOTA", right=True),
    Column("LIMIT", right=True),
    Column("STORE", right=True),
    Column("LIMIT", right=True),
    Column("WEIGHT", right=True),
)

TenantId = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id.", show_default=False)]
Settings = dict[str, float | str | None]  # by the names of the wire; None takes away


def _settings(
    parent: Annotated[
        str | None,
        typer.Option(metavar="TENANT", help="The tenant that it belongs to; it shares its guarantee and limit."),
    ] = None,
    quota_gpus: Annotated[
        str | None, typer.Option(metavar="N", help="GPUs that are always the tenant's; others borrow them while idle.")
    ] = None,
    quota_cores: Annotated[str | None, typer.Option(metavar="N", help="Cores that are always the tenant's.")] = None,
    limit_gpus: Annotated[
        str | None, typer.Option(metavar="N", help="The most GPUs that it may hold, borrowed ones too.")
    ] = None,
    limit_cores: Annotated[str | None, typer.Option(metavar="N", help="The most cores that it may hold.")] = None,
    limit_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most that its jobs may take of the store, such as 256MiB.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(metavar="W", help="Its weight: twice the weight, twice the fair share.")
    ] = None,
) -> Settings:
    """Read what was given of a tenant.

    Raises:
        CommandError: naming every option that is no number.
    """
    texts = (
        ("quota_gpu_milli", "--quota-gpus", quota_gpus, units.parse_gpu_milli),
        ("quota_cores", "--quota-cores", quota_cores, units.parse_integer),
        ("limit_gpu_milli", "--limit-gpus", limit_gpus, units.parse_gpu_milli),
        ("limit_cores", "--limit-cores", limit_cores, units.parse_integer),
        ("limit_bytes", "--limit-bytes", limit_bytes, units.parse_bytes),
    )
    given: Settings = {}
    wrong: list[str] = []
    for name, option, text, parse in texts:
        if text is None:
            continue
        try:
            given[name] = None if text == NONE else parse(text)
        except ValueError as error:
            wrong.append(f"{option} {error}")
    if weight is not None:
        if not weight > 0:
            wrong.append(f"--weight must be more than 0, not {weight:g}")
        given["weight"] = weight
    if parent is not None:
        given["parent"] = None if parent == NONE else parent
    if wrong:
        raise usage("the tenant cannot be taken", details=wrong)
    return given


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(tenants)
    group.command("create")(create)
    group.command("update")(update)
    group.command("delete")(delete)
    app.add_typer(group, name="tenants")


def tenants(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List tenants: what they hold, what they are guaranteed and what they may hold; or change them.

    STORE is what a tenant's jobs take of the store, those included that have ended and are still kept.

    A guarantee is room that is always the tenant's. Others borrow what of it is idle, and give it back when its owner
    wants it. A tenant that nobody made has no guarantee, no limit and the weight 1.

    Tenants share the cluster fairly: the next start is that of the tenant that holds the least for its weight, and the
    queue policy orders the jobs of each tenant. Tenants that belong to another one share what is fair for that.

    \b
    Examples:
      cotenant tenants
      cotenant tenants create vision --quota-gpus 8 --limit-gpus 16
      cotenant tenants update vision --limit-gpus none --weight 2
      cotenant tenants delete vision
    """
    if context.invoked_subcommand is not None:
        return

    async def work(mesh: Mesh) -> list[Tenant]:
        return [tenant async for tenant in all_tenants(mesh)]

    rows = [tenant_view(tenant) for tenant in reach(Flags.of(context), work)]
    if as_json:
        views.print_json(rows)
        return
    print_table(COLUMNS, [_row(view, depth) for view, depth in _families(rows)], nothing="no tenants")


@takes(_settings)
def create(given: Settings, context: typer.Context, tenant_id: TenantId, as_json: options.AsJson = False) -> None:
    """Make a tenant. The same call again changes nothing.

    \b
    Examples:
      cotenant tenants create vision --quota-gpus 8 --quota-cores 96 --limit-gpus 16
      cotenant tenants create segmentation --parent vision --quota-gpus 4
    """
    tenant = _tenant(tenant_id, given)
    _act(context, as_json, lambda mesh: mesh.tenants.CreateTenant(CreateTenantRequest(tenant=tenant)))


@takes(_settings)
def update(given: Settings, context: typer.Context, tenant_id: TenantId, as_json: options.AsJson = False) -> None:
    """Change what is given, and nothing else.

    `none` takes a guarantee, a limit or a parent away.

    \b
    Example:
      cotenant tenants update vision --quota-gpus 12 --limit-gpus none
    """
    if not given:
        raise usage("nothing to change", hint="`cotenant tenants update --help` shows what can be changed")
    request = UpdateTenantRequest(tenant=_tenant(tenant_id, given), update_mask=FieldMask(paths=list(given)))
    _act(context, as_json, lambda mesh: mesh.tenants.UpdateTenant(request))


def delete(context: typer.Context, tenant_id: TenantId) -> None:
    """Forget a tenant that has no live job.

    \b
    Example:
      cotenant tenants delete vision
    """
    reach(Flags.of(context), lambda mesh: mesh.tenants.DeleteTenant(DeleteTenantRequest(id=tenant_id)))
    print(f"{tenant_id} deleted")


async def all_tenants(mesh: Mesh) -> AsyncIterator[Tenant]:
    """Yield all tenants by id, page after page."""
    token = ""
    while True:
        page = await mesh.tenants.ListTenants(ListTenantsRequest(page_size=PAGE_SIZE, page_token=token))
        for tenant in page.tenants:
            yield tenant
        token = page.next_page_token
        if not token:
            return


def _tenant(tenant_id: str, given: Settings) -> Tenant:
    tenant = Tenant(id=tenant_id)
    for name, value in given.items():
        if value is not None:
            setattr(tenant, name, value)
    return tenant


def _act(context: typer.Context, as_json: bool, act: Callable[[Mesh], Awaitable[Any]]) -> None:
    view = tenant_view(reach(Flags.of(context), act).tenant)
    if as_json:
        views.print_json(view)
    else:
        print_table(COLUMNS, [_row(view)], nothing="")


def tenant_view(tenant: Tenant) -> views.View:
    """Tell all that is known of a tenant."""

    def of(name: str) -> Any:
        return getattr(tenant, name) if tenant.HasField(name) else None  # type: ignore[arg-type]  # a field's name

    def in_gpus(name: str) -> float | None:
        return None if of(name) is None else views.gpus(of(name))

    return {
        "id": tenant.id,
        "gpus_used": views.gpus(tenant.used_gpu_milli),
        "quota_gpus": in_gpus("quota_gpu_milli"),
        "limit_gpus": in_gpus("limit_gpu_milli"),
        "cores_used": tenant.used_cores,
        "quota_cores": of("quota_cores"),
        "limit_cores": of("limit_cores"),
        "bytes_used": tenant.used_bytes,
        "bytes_allowed": tenant.allowed_bytes or None,
        "limit_bytes": of("limit_bytes"),
        "weight": tenant.weight or 1.0,
        "parent": tenant.parent or None,
    }


def _families(rows: list[views.View], parent: str | None = None, depth: int = 0) -> Iterator[tuple[views.View, int]]:
    """Give tenants below those that they belong to, each with how deep it stands."""
    known = {view["id"] for view in rows}
    for view in rows:
        if view["parent"] == parent or (parent is None and view["parent"] not in known):
            yield view, depth
            yield from _families(rows, view["id"], depth + 1)


def _row(view: views.View, depth: int = 0) -> list[str]:
    names = ("gpus_used", "quota_gpus", "limit_gpus", "cores_used", "quota_cores", "limit_cores")
    return [
        "  " * depth + view["id"],
        *("-" if view[name] is None else f"{view[name]:g}" for name in names),
        *("-" if view[name] is None else units.short_bytes(view[name]) for name in ("bytes_used", "bytes_allowed")),
        f"{view['weight']:g}",
    ]
