"""`cotenant tenants --usage`: shares and decayed usage of tenants and their users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cotenant.cli import views
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.render import Column, print_table
from cotenant.cli.units import write_seconds
from cotenant.codec import specs
from cotenant.v1.tenant_service_pb2 import DecayedUsage, ListTenantUsageRequest, TenantUsage

COLUMNS = (
    Column("TENANT", elastic=True),
    Column("WEIGHT", right=True),
    Column("SHARE", right=True),
    Column("FAIR", right=True),
    Column("USED", right=True),
    Column("GPU-HOURS", right=True),
    Column("CORE-HOURS", right=True),
)


def show_usage(flags: Flags, *, users: bool, as_json: bool) -> None:
    """Print the shares and the usage of all tenants, and of their users."""

    async def work(mesh: Mesh) -> list[TenantUsage]:
        return await all_usages(mesh, users=users)

    rows = [usage_view(usage, users=users) for usage in with_mesh(flags, work)]
    if as_json:
        views.print_json(rows)
        return
    print_table(COLUMNS, [row for view in rows for row in _rows(view)], nothing="no tenants")
    for half_life in {view["half_life_seconds"] for view in rows}:  # one, or none without tenants
        counts = f"half-life {write_seconds(half_life)}" if half_life else "past use does not count"
        print(counts)


async def all_usages(mesh: Mesh, *, users: bool) -> list[TenantUsage]:
    """Return the usage of all tenants by id."""
    request, found = ListTenantUsageRequest(users=users), list[TenantUsage]()
    while True:
        page = await mesh.tenants.ListTenantUsage(request)
        found += page.usages
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


def usage_view(usage: TenantUsage, *, users: bool) -> views.View:
    """Return what is known about a tenant's shares and usage."""
    view: views.View = {
        "tenant": usage.tenant_id,
        "weight": usage.weight,
        "share": usage.share,
        "fair_share": usage.fair_share,
        "usage_share": usage.usage_share,
        **_hours(usage.usage),
        "half_life_seconds": specs.seconds(usage.half_life) if usage.HasField("half_life") else None,
    }
    if users:
        view["users"] = [{"user": one.user, **_hours(one.usage)} for one in usage.users]
    return view


def _hours(usage: DecayedUsage) -> dict[str, float]:
    return {"gpu_hours": usage.gpu_seconds / 3600, "core_hours": usage.core_seconds / 3600}


def _rows(view: views.View) -> Iterator[Sequence[str]]:
    shares = (f"{view[name]:.0%}" for name in ("share", "fair_share", "usage_share"))
    yield [view["tenant"], f"{view['weight']:g}", *shares, *_written(view)]
    for user in view.get("users", ()):
        yield [f"  {user['user']}", "", "", "", "", *_written(user)]


def _written(view: views.View) -> list[str]:
    return [f"{view[name]:,.2f}" for name in ("gpu_hours", "core_hours")]
