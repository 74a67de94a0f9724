"""Enforces the order against running jobs: which of all jobs should run, and so which start and which make room.

If tenants share fairly, the policy first decides by itself which running jobs stay. Fair share then distributes what is
left, among waiting jobs and the running jobs that the policy would stop: it never stops a job that the policy alone
would let run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from cotenant.core.model.job_table import Capacity, Flags, Floats, Ints, Jobs
from cotenant.core.model.resources import NAMES, Resources
from cotenant.core.model.tenancy import Tenancy
from cotenant.core.scheduling.choice import Choice
from cotenant.core.scheduling.fair_share import Sharing
from cotenant.core.scheduling.order_explanation import outrankers
from cotenant.core.scheduling.ordering import select

IN_THE_WAY_MAX = 1_000  # victims that would fit by counting; more make plans slow and large, and help little


def enforce(
    jobs: Jobs,
    ranked: Ints,
    protected: Flags,
    capacity: Capacity,
    tenancy: Tenancy,
    entitled: Flags | None,
    scores: Floats,
    *,
    strict: bool,
) -> Choice:
    """Return the order split into starts, victims, jobs left out, and jobs over a limit."""
    waiting = ranked[~jobs.running[ranked]]
    selected = fill(jobs, ranked, protected, capacity, tenancy, strict=strict)
    if jobs.borrows.any():
        selected |= _entitled_to_reclaim(jobs, ranked, protected, capacity, tenancy, strict=strict)
    starts, left_out = waiting[selected[waiting]], waiting[~selected[waiting]]
    over = left_out[:0]
    if tenancy.limits:
        beyond = tenancy.over_limit(jobs, selected)[left_out]
        left_out, over = left_out[~beyond], left_out[beyond]
    before = None
    if len(left_out):
        before = partial(outrankers, jobs, ranked, selected, protected, capacity, scores, strict=strict, passed=over)
    if not len(starts):
        return Choice(
            ranked, starts, starts, left_out, over, entitled=entitled, selected=selected, count_outrankers=before
        )
    unwanted = ranked[(jobs.running & ~selected)[ranked]][::-1]
    after = ranked[int(np.argmax(ranked == starts[0])) :]
    in_the_way = after[(jobs.running & selected & ~protected)[after]][::-1]
    victims = np.concatenate([unwanted, in_the_way[:IN_THE_WAY_MAX]])
    return Choice(
        ranked, starts, victims, left_out, over, entitled=entitled, selected=selected, count_outrankers=before
    )


def _entitled_to_reclaim(
    jobs: Jobs, ranked: Ints, protected: Flags, capacity: Capacity, tenancy: Tenancy, *, strict: bool
) -> Flags:
    """Return the rows that fit if jobs with fewer GPUs, where these borrow, hold nothing.

    Placement reclaims lent resources whatever the order (ADR 33), so a borrower must not keep an entitled job out by
    counting. A policy lends to jobs with fewer GPUs than those it reserves for; whether a gang is really entitled, and
    to what, is placement's answer. Jobs that borrowed in their last run are counted like borrowers: while one waits
    that gave its resources back, the job that they were reclaimed for must stay admitted.
    """
    entitled = np.zeros(len(jobs), dtype=np.bool_)
    for most in {0, int(jobs.gpu_milli[jobs.borrows].max())}:
        lent = jobs.borrows & (jobs.gpu_milli <= most)
        needs = tuple([np.where(lent, 0, column) for column in jobs.needs])
        firm = replace(jobs, gpu_milli=needs[NAMES.index("gpu_milli")], cores=needs[NAMES.index("cores")], needs=needs)
        entitled |= (jobs.gpu_milli > most) & fill(firm, ranked, protected, capacity, tenancy, strict=strict)
    return entitled


def enforce_fairly(
    jobs: Jobs,
    ranked: Ints,
    protected: Flags,
    capacity: Capacity,
    tenancy: Tenancy,
    entitled: Flags | None,
    scores: Floats,
    sharing: Sharing,
    blocks: Ints | None,
    *,
    strict: bool,
) -> Choice:
    """Return the order split as by `enforce`, with what the policy would free shared fairly among tenants.

    A start may have the resources of a running job that the policy alone would stop too, or that comes after it in the
    policy's own order.
    """
    alone = fill(jobs, ranked, protected, capacity, tenancy, strict=strict)
    stays = (alone | protected) & jobs.running
    rest = ranked[~stays[ranked]]
    fair = sharing.interleave(rest, stays, blocks=blocks)
    order = np.concatenate([ranked[stays[ranked]], fair])
    made = enforce(jobs, order, stays, capacity, tenancy, entitled, scores, strict=strict)
    held_back = sharing.held_back(rest, fair, jobs.running) & ~jobs.running
    if not len(made.starts):
        return replace(made, held_back=held_back, sharing=sharing)
    place = np.empty(len(jobs), dtype=np.int64)
    place[ranked] = np.arange(len(ranked))
    in_the_way = ranked[(stays & ~protected)[ranked]][::-1]
    ahead = np.searchsorted(np.maximum.accumulate(place[made.starts]), place[in_the_way])  # starts before each
    in_the_way, ahead = in_the_way[ahead > 0][:IN_THE_WAY_MAX], ahead[ahead > 0][:IN_THE_WAY_MAX]
    return replace(
        made,
        victims=np.concatenate([made.victims, in_the_way]),
        turns=np.concatenate([made.ahead(), ahead]),
        held_back=held_back,
        sharing=sharing,
    )


def fill(jobs: Jobs, ranked: Ints, protected: Flags, capacity: Capacity, tenancy: Tenancy, *, strict: bool) -> Flags:
    """Return the rows that fit, in order, into what is left; protected rows are taken beforehand.

    If tenants have limits, rows are checked one by one, because no array operation can do that.
    """
    if not tenancy.limits:
        return select(jobs, ranked, protected, capacity, strict=strict)
    selected = protected.copy()
    free = Resources(
        *(max(0, have - int(need[protected].sum())) for need, have in zip(jobs.needs, capacity, strict=True))
    )
    limits = tenancy.walk(jobs, protected)
    rows = ranked[~protected[ranked]]
    needs = (Resources(*need) for need in zip(*(column[rows].tolist() for column in jobs.needs), strict=True))
    for row, need in zip(rows.tolist(), needs, strict=True):
        if not limits.allows(row, need.gpu_milli, need.cores):
            continue  # its own tenant's limit, which must not hold back others
        if need.fits(free):
            selected[row] = True
            free -= need
            limits.take(row, need.gpu_milli, need.cores)
        elif strict:
            break
    return selected
