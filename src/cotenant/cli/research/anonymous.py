"""Snapshots without names: they can be given to strangers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from cotenant.core.model.job import TENANT_DEFAULT
from cotenant.simulator.snapshots import Snapshot


def without_names(snapshot: Snapshot) -> Snapshot:
    """Give numbers for names, the same one wherever a name stands, so that all is decided as before.

    Reasons to wait are left out, for their sentences name jobs; racks and GPU types stay.
    """
    node, job, tenant = _numbered("node"), _numbered("job"), _numbered("tenant", keeps=TENANT_DEFAULT)
    user, model, name = _numbered("user"), _numbered("model"), _numbered("name")
    nodes = tuple(replace(one, id=node(one.id)) for one in snapshot.nodes)
    jobs = tuple(
        replace(
            one,
            id=job(one.id),
            tenant=tenant(one.tenant),
            user=user(one.user),
            model=model(one.model),
            name=name(one.name),
            held=tuple(replace(held, node=node(held.node)) for held in one.held),
            refusal="",
        )
        for one in snapshot.jobs
    )
    tenants = tuple(replace(one, id=tenant(one.id)) for one in snapshot.tenants)
    return replace(snapshot, nodes=nodes, jobs=jobs, tenants=tenants)


def _numbered(word: str, keeps: str = "") -> Callable[[str], str]:
    """Name things by a word and a number, in the order in which they are met; what has no name gets none."""
    numbers, known = count(1), {"": "", keeps: keeps}

    def name(text: str) -> str:
        if text not in known:
            known[text] = f"{word}-{next(numbers):04}"
        return known[text]

    return name
