"""Anonymized snapshots, which can be shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from cotenant.core.model.job import TENANT_DEFAULT
from cotenant.simulator.snapshots import Snapshot


def anonymize(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with names replaced consistently by numbers, so that all decisions stay the same.

    Reasons to wait are removed, because their sentences name jobs; racks and GPU types stay.
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
    """Return a function that replaces names by a word and a number in order of appearance; "" stays empty."""
    numbers, known = count(1), {"": "", keeps: keeps}

    def name(text: str) -> str:
        if text not in known:
            known[text] = f"{word}-{next(numbers):04}"
        return known[text]

    return name
