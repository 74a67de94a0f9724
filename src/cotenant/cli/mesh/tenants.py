"""`cotenant tenants`: quotas, limits, weights and current usage of tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any

from google.protobuf.field_mask_pb2 import FieldMask

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.tenant_usage import show_usage
from cotenant.cli.outcome import usage_error
from cotenant.cli.render import Column, print_table
from cotenant.cli.shared_options import with_options_of
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
Settings = dict[str, float | str | None]  # by wire name; None removes


def _settings(
    parent: Annotated[
        str | None,
        typer.Option(metavar="TENANT", help="Parent tenant, whose quota and limit it shares."),
    ] = None,
    quota_gpus: Annotated[
        str | None, typer.Option(metavar="N", help="Guaranteed GPUs; others may borrow them while idle.")
    ] = None,
    quota_cores: Annotated[str | None, typer.Option(metavar="N", help="Guaranteed cores.")] = None,
    limit_gpus: Annotated[str | None, typer.Option(metavar="N", help="Maximum GPUs, including borrowed ones.")] = None,
    limit_cores: Annotated[str | None, typer.Option(metavar="N", help="Maximum cores.")] = None,
    limit_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum store space for its jobs, such as 256MiB.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(metavar="W", help="Weight: twice the weight, twice the fair share.")
    ] = None,
) -> Settings:
    """Return the given fields of a tenant.

    Raises:
        CommandError: names every invalid option.
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
        raise usage_error("invalid tenant", details=wrong)
    return given


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(tenants)
    group.command("create")(create)
    group.command("update")(update)
    group.command("delete")(delete)
    app.add_typer(group, name="tenants")


def tenants(
    context: typer.Context,
    usage: Annotated[bool, typer.Option("--usage", help="List shares and decayed usage instead.")] = False,
    users: Annotated[bool, typer.Option("--users", help="With --usage, list each tenant's users too.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List tenants with their usage, quotas, limits and weights; or create, update and delete them.

    STORE is the store space of a tenant's jobs, including jobs that have ended and are still kept.

    A quota is capacity guaranteed to a tenant. Idle quota is lent to others and reclaimed when its owner needs it. A
    tenant that was never created has no quota, no limit and weight 1.

    Tenants share the cluster fairly: the tenant that holds the least for its weight starts the next job, and the queue
    policy orders the jobs of each tenant. Child tenants share their parent's fair share.

    With --usage: SHARE is what a tenant holds of the cluster now, FAIR its fair share, and USED its share of the
    decayed usage of all tenants, which counts in fair sharing as if it were held now. GPU-HOURS and CORE-HOURS are that
    usage; with each half-life, half of it is forgotten.

    \b
    Examples:
      cotenant tenants
      cotenant tenants --usage --users
      cotenant tenants create vision --quota-gpus 8 --limit-gpus 16
      cotenant tenants update vision --limit-gpus none --weight 2
      cotenant tenants delete vision
    """
    if context.invoked_subcommand is not None:
        return
    if users and not usage:
        raise usage_error("--users needs --usage")
    if usage:
        show_usage(Flags.of(context), users=users, as_json=as_json)
        return

    async def work(mesh: Mesh) -> list[Tenant]:
        return [tenant async for tenant in all_tenants(mesh)]

    rows = [tenant_view(tenant) for tenant in with_mesh(Flags.of(context), work)]
    if as_json:
        views.print_json(rows)
        return
    print_table(COLUMNS, [_row(view, depth) for view, depth in _families(rows)], nothing="no tenants")


@with_options_of(_settings)
def create(given: Settings, context: typer.Context, tenant_id: TenantId, as_json: options.AsJson = False) -> None:
    """Create a tenant. Repeating the same call changes nothing.

    \b
    Examples:
      cotenant tenants create vision --quota-gpus 8 --quota-cores 96 --limit-gpus 16
      cotenant tenants create segmentation --parent vision --quota-gpus 4
    """
    tenant = _tenant(tenant_id, given)
    _act(context, as_json, lambda mesh: mesh.tenants.CreateTenant(CreateTenantRequest(tenant=tenant)))


@with_options_of(_settings)
def update(given: Settings, context: typer.Context, tenant_id: TenantId, as_json: options.AsJson = False) -> None:
    """Update the given fields of a tenant.

    `none` removes a quota, a limit or the parent.

    \b
    Example:
      cotenant tenants update vision --quota-gpus 12 --limit-gpus none
    """
    if not given:
        raise usage_error("nothing to change", hint="see `cotenant tenants update --help`")
    request = UpdateTenantRequest(tenant=_tenant(tenant_id, given), update_mask=FieldMask(paths=list(given)))
    _act(context, as_json, lambda mesh: mesh.tenants.UpdateTenant(request))


def delete(context: typer.Context, tenant_id: TenantId) -> None:
    """Delete a tenant without live jobs.

    \b
    Example:
      cotenant tenants delete vision
    """
    with_mesh(Flags.of(context), lambda mesh: mesh.tenants.DeleteTenant(DeleteTenantRequest(id=tenant_id)))
    print(f"{tenant_id} deleted")


async def all_tenants(mesh: Mesh) -> AsyncIterator[Tenant]:
    """Yield all tenants by id, page by page."""
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
    view = tenant_view(with_mesh(Flags.of(context), act).tenant)
    if as_json:
        views.print_json(view)
    else:
        print_table(COLUMNS, [_row(view)], nothing="")


def tenant_view(tenant: Tenant) -> views.View:
    """Return everything known about a tenant."""

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
    """Yield tenants in tree order, each with its depth."""
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
