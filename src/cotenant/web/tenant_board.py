"""The pages of tenants: quotas and what is borrowed and lent of them, shares, and what was used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.usage import GROUPS, UsageBy, usage_view
from cotenant.cli.mesh.tenant_usage import all_usages
from cotenant.cli.mesh.tenant_usage import usage_view as share_view
from cotenant.cli.mesh.tenants import all_tenants, tenant_view
from cotenant.client.errors import NotFound
from cotenant.codec.specs import timestamp
from cotenant.v1.job_service_pb2 import SummarizeUsageRequest
from cotenant.web.boards import Ask, BoardKind, Part, part
from cotenant.web.queue_board import free
from cotenant.web.rows import Row

SECONDS = 5.0
DAYS = 28  # over which tenants and users are summed up
WEEKS = 8  # each by itself


async def read(ask: Ask) -> Mapping[str, Row]:
    """Return the tenants and their shares."""
    tenants, shares, pieces = await asyncio.gather(part(ask(_tenants)), part(ask(_shares)), part(ask(free)))
    if pieces.rows:
        tenants = Part(lent(tenants.rows, pieces.rows[0]), tenants.trouble)
    found = {"tenants": tenants, "shares": shares, "free": pieces}
    return {name: {"rows": one.rows, "trouble": one.trouble} for name, one in found.items()}


KIND = BoardKind(read, SECONDS)


async def check(ask: Ask, tenant: str) -> None:
    """Check that there is a tenant, and that the principal may see it.

    Raises:
        NotFound: there is none, or it is not the principal's.
    """
    if all(one["id"] != tenant for one in await ask(_tenants)):
        raise NotFound(f"tenant {tenant!r} not found")


def lent(tenants: Sequence[Row], free: Row) -> list[Row]:
    """Return the tenants with what each has borrowed, and what of its idle quota is at least in use by others.

    Idle quota that is not free is held by others. How much of each tenant's quota they hold does not show; but it is at
    least its idle quota less all that is free.

    >>> one = {"gpus_used": 2, "quota_gpus": 8, "cores_used": 9, "quota_cores": None}
    >>> [told] = lent([one], {"gpus_free": 1, "cores_free": 4})
    >>> told["gpus_borrowed"], told["gpus_lent_min"], told["cores_borrowed"], told["cores_lent_min"]
    (0, 5, None, None)
    """
    return [{**one, **_lent(one, free, "gpus"), **_lent(one, free, "cores")} for one in tenants]


def _lent(tenant: Row, free: Row, what: str) -> Row:
    used, quota = tenant[f"{what}_used"], tenant[f"quota_{what}"]
    return {
        f"{what}_borrowed": None if quota is None else max(0, used - quota),
        f"{what}_idle": None if quota is None else max(0, quota - used),
        f"{what}_lent_min": None if quota is None else max(0, quota - used - free[f"{what}_free"]),
    }


async def _tenants(mesh: Mesh) -> list[Row]:
    return [tenant_view(one) async for one in all_tenants(mesh)]


async def _shares(mesh: Mesh) -> list[Row]:
    return [share_view(one, users=False) for one in await all_usages(mesh, users=False)]


# What was used ------------------------------------------------------------------------------------------------------


async def usage(ask: Ask, tenant: str = "") -> Row:
    """Return what was used in the last weeks: by week, tenant and user; of one tenant, or of all that may be seen."""
    now = time.time()
    recent = now - DAYS * 86400
    weeks, tenants, users, decayed = await asyncio.gather(
        part(_used(ask, UsageBy.WEEK, tenant, monday(now, WEEKS - 1))),
        part(_used(ask, UsageBy.TENANT, tenant, recent)),
        part(_used(ask, UsageBy.USER, tenant, recent)),
        part(ask(lambda mesh: _decayed(mesh, tenant))),
    )
    found = {"weeks": weeks, "tenants": tenants, "users": users, "decayed": decayed}
    return {"days": DAYS, **{name: one._asdict() for name, one in found.items()}}


def monday(now: float, weeks_before: int) -> float:
    """Return when the week of a moment began, or one before it, in UTC.

    >>> datetime.fromtimestamp(monday(1_800_000_000.0, 1), UTC).isoformat()
    '2027-01-04T00:00:00+00:00'
    """
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return (today - timedelta(days=today.weekday(), weeks=weeks_before)).timestamp()


async def _used(ask: Ask, by: UsageBy, tenant: str, since: float) -> list[Row]:
    request = SummarizeUsageRequest(by=GROUPS[by], tenant=tenant, since=timestamp(since))
    answer = await ask(lambda mesh: mesh.jobs.SummarizeUsage(request))
    return [usage_view(by, count) for count in answer.counts]


async def _decayed(mesh: Mesh, tenant: str) -> list[Row]:
    """Return the decayed usage of a tenant's users."""
    found = await all_usages(mesh, users=True) if tenant else []
    return [user for one in found if one.tenant_id == tenant for user in share_view(one, users=True)["users"]]
