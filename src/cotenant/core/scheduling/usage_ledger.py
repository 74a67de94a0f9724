"""Usage ledger: the decayed usage of every tenant and user, from what their jobs hold.

A job is charged from the time at which it starts to hold resources until it stops. Both may be reported late: the
ledger then adds what it missed, or takes back what it counted too much. So its figures depend on the intervals alone,
not on when they became known.

A tenant that is restored from a record is counted until the time of the record: what was held before is in the record,
and is not charged again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cotenant.core.model.job_table import Floats
from cotenant.core.model.resources import KINDS, NOTHING, Resources
from cotenant.core.scheduling.decayed_usage import DecayedUsage

USERS_MAX = 256  # of a tenant; those with the least usage are dropped, and only the tenant's own usage includes them


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The decayed usage of a tenant and of its users, at one time."""

    own: DecayedUsage
    users: Mapping[str, DecayedUsage] = field(default_factory=dict)


@dataclass(slots=True)
class _Account:
    """The usage of a tenant or user, and what its jobs hold now."""

    usage: DecayedUsage
    held: Resources = NOTHING

    def at(self, now: float) -> DecayedUsage:
        """Return the usage at a time; a clock that was set back changes nothing."""
        return self.usage.advanced(max(now, self.usage.at_seconds), self.held)

    def charge(self, held: Resources, since: float, until: float) -> None:
        """Add what was held in an interval that has passed."""
        until = min(until, self.usage.at_seconds)
        if since < until:
            self.usage = self.usage.charged(held, since, until)

    def refund(self, held: Resources, since: float) -> None:
        """Subtract what has been counted as held since a time."""
        if since < self.usage.at_seconds:
            self.usage = self.usage.refunded(held, since, self.usage.at_seconds)


@dataclass(slots=True)
class _TenantAccounts:
    own: _Account
    counted_until: float = -math.inf
    users: dict[str, _Account] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Charge:
    """What a job holds, and from when on it is charged for it."""

    tenant: str
    user: str
    held: Resources
    since: float


class UsageLedger:
    """Charges tenants and users for what their jobs hold. Times are in seconds, and `now` should not decrease.

    >>> ledger = UsageLedger(3600.0)
    >>> ledger.start("job", "vision", "ann", Resources(2000), since=0.0, now=0.0)
    >>> round(ledger.usage("vision", 3600.0).own.average[0])
    1000
    """

    def __init__(self, half_life_seconds: float) -> None:
        self.half_life_seconds = half_life_seconds
        self._tenants: dict[str, _TenantAccounts] = {}
        self._charges: dict[str, _Charge] = {}

    @property
    def tenants(self) -> list[str]:
        """The tenants that ever held anything."""
        return list(self._tenants)

    def charges(self, job_id: str) -> bool:
        """Return whether a job is charged now."""
        return job_id in self._charges

    def restore(self, tenant: str, usage: TenantUsage) -> None:
        """Set the usage of a tenant that has none yet."""
        users = {user: _Account(known) for user, known in usage.users.items()}
        self._tenants[tenant] = _TenantAccounts(_Account(usage.own), usage.own.at_seconds, users)

    def start(self, job_id: str, tenant: str, user: str, held: Resources, *, since: float, now: float) -> None:
        """Charge a job from a time on that may have passed."""
        since = max(min(since, now), self.counted_until(tenant))
        for account in self._accounts(tenant, user, now):
            account.charge(held, since, account.usage.at_seconds)
            account.held += held
        self._charges[job_id] = _Charge(tenant, user, held, since)

    def stop(self, job_id: str, *, until: float, now: float) -> None:
        """Stop to charge a job, which held its resources until a time that may have passed."""
        charge = self._charges.pop(job_id)
        for account in self._accounts(charge.tenant, charge.user, now):
            account.held -= charge.held
            account.refund(charge.held, max(until, charge.since))

    def change(self, job_id: str, held: Resources, *, at: float, now: float) -> None:
        """Charge a job for other resources from a time on."""
        charge = self._charges[job_id]
        if charge.held != held:
            self.stop(job_id, until=at, now=now)
            self.start(job_id, charge.tenant, charge.user, held, since=max(charge.since, at), now=now)

    def charge(self, tenant: str, user: str, held: Resources, interval: tuple[float, float], now: float) -> None:
        """Charge for what a job held in an interval, from its start to its end, that has passed."""
        since = max(interval[0], self.counted_until(tenant))
        if since < interval[1]:
            for account in self._accounts(tenant, user, now):
                account.charge(held, since, interval[1])

    def counted_until(self, tenant: str) -> float:
        """Return the time of the record from which a tenant was restored; minus infinity if there was none."""
        known = self._tenants.get(tenant)
        return known.counted_until if known else -math.inf

    def usage(self, tenant: str, now: float) -> TenantUsage:
        """Return the usage of a tenant and of its users, the largest `USERS_MAX` of them."""
        known = self._tenants.get(tenant)
        if known is None:
            return TenantUsage(DecayedUsage(self.half_life_seconds, now))
        users = {user: account.at(now) for user, account in known.users.items()}
        if len(users) > USERS_MAX:
            self._drop_users(known, users)
        return TenantUsage(known.own.at(now), users)

    @staticmethod
    def _drop_users(known: _TenantAccounts, users: dict[str, DecayedUsage]) -> None:
        """Drop the users with the least usage that hold nothing now."""
        idle = [user for user, account in known.users.items() if account.held == NOTHING]
        for user in heapq.nsmallest(len(users) - USERS_MAX, idle, key=lambda user: users[user].amounts):
            del known.users[user], users[user]

    def averages(self, tenants: Sequence[str], now: float) -> Floats:
        """Return what tenants held on decayed average: a row for each of `KINDS`, a column for each tenant."""
        found = np.zeros((len(KINDS), len(tenants)))
        for number, tenant in enumerate(tenants):
            if known := self._tenants.get(tenant):
                found[:, number] = known.own.at(now).average
        return found

    def _accounts(self, tenant: str, user: str, now: float) -> tuple[_Account, _Account]:
        """Return the accounts of a tenant and of one of its users, advanced to now."""
        nothing = DecayedUsage(self.half_life_seconds, now)
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _TenantAccounts(_Account(nothing))
        mine = known.users.get(user)
        if mine is None:
            mine = known.users[user] = _Account(nothing)
        for account in (known.own, mine):
            account.usage = account.at(now)
        return known.own, mine
