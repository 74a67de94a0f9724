"""The order enforced against running jobs: who should run of all jobs, and so who starts and who makes room.

Where tenants share fairly, the policy decides first by itself which running jobs stay. Fair share then hands out what
is left, to waiting jobs and to the running ones that the policy would stop: it never stops a job that the policy alone
would let run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from cotenant.core.model.job_table import Capacity, Flags, Floats, Ints, Jobs
from cotenant.core.model.tenancy import Tenancy
from cotenant.core.scheduling.choice import Choice
from cotenant.core.scheduling.fair_share import Sharing
from cotenant.core.scheduling.order_explanation import outrankers
from cotenant.core.scheduling.ordering import select

IN_THE_WAY_MAX = 1_000  # victims that the count would let run; more make plans slow and large, and help little


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
    """Split the order into starts, victims, those that it leaves out, and those over a limit."""
    waiting = ranked[~jobs.running[ranked]]
    selected = fill(jobs, ranked, protected, capacity, tenancy, strict=strict)
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
            ranked, starts, starts, left_out, over, entitled=entitled, selected=selected, tell_outrankers=before
        )
    unwanted = ranked[(jobs.running & ~selected)[ranked]][::-1]
    after = ranked[int(np.argmax(ranked == starts[0])) :]
    in_the_way = after[(jobs.running & selected & ~protected)[after]][::-1]
    victims = np.concatenate([unwanted, in_the_way[:IN_THE_WAY_MAX]])
    return Choice(ranked, starts, victims, left_out, over, entitled=entitled, selected=selected, tell_outrankers=before)


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
    """Split the order as `enforce` does, with what the policy would free shared fairly among tenants.

    A start may have the room of a running job that the policy alone would stop too, or that comes after it in the
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
    """Walk the order and take what fits into what is left; what may not be preempted is taken beforehand.

    Where tenants have limits the walk goes job by job, which no array operation does.
    """
    if not tenancy.limits:
        return select(jobs, ranked, protected, capacity, strict=strict)
    selected = protected.copy()
    columns = (jobs.gpu_milli, jobs.cores, jobs.memory_bytes)
    totals = (capacity.gpu_milli, capacity.cores, capacity.memory_bytes)
    gpus, cores, memory = (
        max(0, have - int(need[protected].sum())) for need, have in zip(columns, totals, strict=True)
    )
    limits = tenancy.walk(jobs, protected)
    rows = ranked[~protected[ranked]]
    for row, need_gpus, need_cores, need_memory in zip(
        rows.tolist(), *(column[rows].tolist() for column in columns), strict=True
    ):
        if not limits.allows(row, need_gpus, need_cores):
            continue  # its own tenant holds it back; that is no reason to hold others back
        if need_gpus <= gpus and need_cores <= cores and need_memory <= memory:
            selected[row] = True
            gpus, cores, memory = gpus - need_gpus, cores - need_cores, memory - need_memory
            limits.take(row, need_gpus, need_cores)
        elif strict:
            break
    return selected
