"""The laws that every combination keeps to, each of one case."""

from __future__ import annotations

import math
import random

import numpy as np
from tests.unit.simulator.auditing import Auditor
from tests.unit.simulator.combinations import Case, Lines

from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import Life
from cotenant.simulator.physics.outages import Outages

STEPS_BEFORE_MAX = 60
ALONE_STEPS_MAX = 200


def audited(case: Case) -> None:
    """Nothing is given twice, gangs are whole, limits hold, nobody is forgotten."""
    auditor = Auditor(case)
    seen: list[Simulation] = []

    def look(simulation: Simulation) -> bool:
        seen[:] = [simulation]
        return auditor.look(simulation)

    result = case.run(look, auditor)
    if result.complete and seen:
        auditor.done(seen[0])
    auditor.history.agrees(result)


def replayed(case: Case) -> None:
    """The same input and seed give the same recording, byte for byte."""
    first, again = Lines([]), Lines([])
    one, other = (case.run(lambda _: True, lines) for lines in (first, again))
    assert first.lines == again.lines
    assert one.outcomes == other.outcomes


def explained(case: Case) -> None:
    """Whoever waits starts once all others are gone, all nodes are back, and those times have passed that are told."""
    chance, auditor = random.Random(case.seed), Auditor(case)
    at, alone = chance.randint(1, STEPS_BEFORE_MAX), list[Life]()
    told = ""

    def look(simulation: Simulation) -> bool:
        nonlocal told
        if alone:
            return not alone[0].running and not alone[0].finished and simulation.steps < at + ALONE_STEPS_MAX
        auditor.look(simulation)
        if simulation.steps >= at and (waiting := sorted(auditor.history.waiting_since)):
            job_id = chance.choice(waiting)
            told = auditor.history.reasons[job_id]
            alone.append(next(life for life in simulation.lives if life.job.id == job_id))
            leave_alone(simulation, alone[0])
        return True

    case.run(look, auditor)
    if alone:
        (life,) = alone
        given_up = not math.isnan(life.given_up_seconds)
        assert life.running or life.finished or given_up, (
            f"{life.job.id} waits for {told}, is alone, and does not start"
        )


def leave_alone(simulation: Simulation, life: Life) -> None:
    """Take all others away, have all nodes back, and let nothing come or break any more."""
    scheduler, now = simulation._scheduler, simulation.now
    simulation.submitted = len(simulation.trace.jobs)
    simulation.world.outages = Outages(0, 0)
    for node in np.flatnonzero(~scheduler._ledger.open).tolist():
        scheduler.reopen(node)
    for other in [one for one in scheduler._lives.values() if one is not life]:
        if other.running:
            scheduler.finish(other, now)
            simulation.finished += 1
        else:
            other.give_up(now)
            scheduler.given_up += 1
            scheduler._waiting.remove(other)
            scheduler._leave(other)
    simulation._retries = [one for one in simulation._retries if one[1] == life.sequence]
    scheduler.order_expires = now
