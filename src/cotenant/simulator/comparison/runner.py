"""Runs the arms of a comparison, each with each seed, in several processes.

An arm without randomness is run once: whether anything was drawn at random is known after its first run. Each process
reads the trace once. Results come in the arms' order, however long each took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from cotenant.core.model.job_table import Floats
from cotenant.core.policy.options import BadOption
from cotenant.plugins import UnknownPolicy
from cotenant.simulator.clusters.cluster import BadCluster
from cotenant.simulator.comparison.arms import ComparedArm
from cotenant.simulator.comparison.time_series import Sampler, TimeSeries
from cotenant.simulator.engine import Simulation
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.process_pool import Stopped, WorkerDied, workers
from cotenant.simulator.results import Result
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.traces import BadTrace, Trace, load

DRAWN_JOBS_MAX = 300  # with more, a chart of which job ran where shows nothing

Progress = Callable[[int, int], None]
Share = Callable[[float], None]


class ArmFailed(Exception):
    """An arm could not be run; `input_at_fault` if the user can fix it."""

    def __init__(self, label: str, why: str, *, input_at_fault: bool) -> None:
        super().__init__(f"arm {label!r}: {why}")
        self.input_at_fault = input_at_fault


@dataclass(frozen=True, slots=True)
class JobColumns:
    """The finished jobs, in order of submission."""

    ids: tuple[str, ...]
    jct_seconds: Floats
    queue_seconds: Floats
    gpus: Floats


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run of an arm, its result without outcomes; outcomes and time series are kept for the first run only."""

    result: Result
    jobs: JobColumns | None = None
    series: TimeSeries | None = None


@dataclass(frozen=True, slots=True)
class Runs:
    """All finished runs, by arm and in order of seeds; `complete` False: stopped early."""

    arms: tuple[ComparedArm, ...]
    by_arm: Mapping[str, tuple[ArmRun, ...]]
    complete: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    input_at_fault: bool


@dataclass(frozen=True, slots=True)
class _Task:
    """A task for a process: the number of the arm and its scenario; the first run of an arm is kept in detail."""

    arm: int
    scenario: Scenario
    first: bool
    drawn: bool


def run_arms(
    arms: Sequence[ComparedArm],
    *,
    seeds: int,
    processes: int,
    drawn: bool = False,
    stopped: Stopped = lambda: False,
    progress: Progress = lambda done, of: None,
    share: Share = lambda finished: None,
) -> Runs:
    """Run every arm with this many seeds, starting from its scenario's. `drawn`: keep what plots need.

    `share` is called while runs are in this process, with the share of the run's jobs that have finished.

    Raises:
        ArmFailed: an arm cannot be run, or a policy failed. Other arms are not awaited.
    """
    tasks = deque(_Task(number, arm.scenario, True, drawn) for number, arm in enumerate(arms))
    ran: dict[tuple[int, int], ArmRun] = {}
    work = partial(_run, share=share) if processes == 1 else _run
    with workers(work, processes, stopped) as answers:
        of = len(tasks)
        for task, answer in answers(tasks):
            if isinstance(answer, WorkerDied):
                raise ArmFailed(arms[task.arm].label, answer.why, input_at_fault=False)
            if isinstance(answer, _Failure):
                raise ArmFailed(arms[task.arm].label, answer.why, input_at_fault=answer.input_at_fault)
            if answer is None:
                continue  # it was stopped
            ran[task.arm, task.scenario.seed] = answer
            if task.first and answer.result.by_chance:
                tasks += _more(task, seeds)
                of += seeds - 1
            progress(len(ran), of)
    by_arm = {arm.label: tuple(ran[key] for key in sorted(ran) if key[0] == number) for number, arm in enumerate(arms)}
    return Runs(tuple(arms), by_arm, complete=len(ran) == of)


def _more(task: _Task, seeds: int) -> Iterator[_Task]:
    """Yield the tasks of an arm's other seeds."""
    first = task.scenario.seed
    for extra in range(1, seeds):
        yield replace(task, scenario=replace(task.scenario, seed=first + extra), first=False, drawn=False)


def _run(task: _Task, stopped: Stopped, share: Share = lambda finished: None) -> ArmRun | _Failure | None:
    """Run a task; None if stopped."""
    scenario = task.scenario

    def watch(simulation: Simulation) -> bool:
        share(simulation.finished / len(simulation.trace))
        return not stopped()

    try:
        trace = trace_of(scenario)
        since = trace.snapshot_state.now_seconds if trace.snapshot_state else 0.0
        sampler = Sampler(bars=len(trace) <= DRAWN_JOBS_MAX, since_seconds=since) if task.drawn else None
        result = scenario.run(trace=trace, recorder=sampler, watch=watch)
    except PolicyFailed as error:
        return _Failure(str(error), input_at_fault=False)
    except (BadTrace, BadCluster, UnknownPolicy, BadOption) as error:
        return _Failure(str(error), input_at_fault=True)
    if not result.complete:
        return None
    return arm_run_of(result, sampler, columns=task.first)


def arm_run_of(result: Result, sampler: Sampler | None, *, columns: bool = True) -> ArmRun:
    """Return what a comparison needs of a run."""
    series = sampler.series() if sampler else None
    return ArmRun(replace(result, outcomes=()), _columns(result) if columns else None, series)


def trace_of(scenario: Scenario) -> Trace:
    """Return a scenario's trace; the last one is cached."""
    return _trace(scenario.trace, scenario.format, scenario.skip_bad_rows)


@lru_cache(maxsize=1)
def _trace(source: str, format_name: str | None, skip_bad_rows: bool) -> Trace:
    return load(source, format_name, skip_bad_rows=skip_bad_rows)


def _columns(result: Result) -> JobColumns:
    done = [one for one in result.outcomes if one.finished_seconds is not None]
    return JobColumns(
        tuple(one.id for one in done),
        np.array([one.jct_seconds for one in done], dtype=np.float64),
        np.array([one.queue_seconds for one in done], dtype=np.float64),
        np.array([one.gpu_milli / 1000 for one in done], dtype=np.float64),
    )
