"""Laws of every combination, each for one case."""

from __future__ import annotations

import math
import random

import numpy as np
from tests.unit.simulator.auditing import Auditor
from tests.unit.simulator.combinations import Case, Lines

from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics.outages import Outages

STEPS_BEFORE_MAX = 60
ALONE_STEPS_MAX = 200


def audited(case: Case) -> None:
    """No overcommitment, whole gangs, limits, and no forgotten job."""
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
    """A waiting job starts once all others are gone, all nodes are up, and all announced times have passed."""
    chance, auditor = random.Random(case.seed), Auditor(case)
    at, alone = chance.randint(1, STEPS_BEFORE_MAX), list[SimulatedJob]()
    told = ""

    def look(simulation: Simulation) -> bool:
        nonlocal told
        if alone:
            return not alone[0].running and not alone[0].finished and simulation.steps < at + ALONE_STEPS_MAX
        auditor.look(simulation)
        if simulation.steps >= at and (waiting := sorted(auditor.history.waiting_since)):
            job_id = chance.choice(waiting)
            told = auditor.history.reasons.get(job_id, "the next cycle, since it was moved just now")
            alone.append(next(sim_job for sim_job in simulation.sim_jobs if sim_job.job.id == job_id))
            leave_alone(simulation, alone[0])
        return True

    case.run(look, auditor)
    if alone:
        (sim_job,) = alone
        given_up = not math.isnan(sim_job.given_up_seconds)
        assert sim_job.running or sim_job.finished or given_up, (
            f"{sim_job.job.id} waits for {told}, is alone, and does not start"
        )


def leave_alone(simulation: Simulation, sim_job: SimulatedJob) -> None:
    """Remove all other jobs, repair all nodes, and stop all arrivals and failures."""
    scheduler, now = simulation._scheduler, simulation.now
    simulation.submitted = len(simulation.trace.jobs)
    simulation.world.outages = Outages(0, 0)
    for node in np.flatnonzero(~scheduler._ledger.open).tolist():
        scheduler.reopen(node)
    for other in [one for one in scheduler._sim_jobs.values() if one is not sim_job]:
        if other.running:
            scheduler.finish(other, now)
            simulation.finished += 1
        else:
            other.give_up(now)
            scheduler.given_up += 1
            scheduler._waiting.remove(other)
            scheduler._leave(other)
    simulation._retries = [one for one in simulation._retries if one[1] == sim_job.sequence]
    scheduler.order_expires = now
