"""Runs a paper's cases in so many processes, and keeps what was done where it is cut short."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from cotenant.reproduction.words import Asked, BadData, Case, Done, Figures, Findings, Paper, Stopped
from cotenant.simulator.pool import Broken, workers
from cotenant.simulator.traces import BadTrace

PROCESS_BYTES = 500 << 20  # what one needs for the largest of the cases, measured
Progress = Callable[[int, int], None]


class CaseFailed(Exception):
    """A case could not be run, and why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A paper with what was found; `complete` False: somebody stopped it, and the findings are of what was done."""

    paper: Paper
    asked: Asked
    findings: Findings
    done: int
    of: int
    wall_seconds: float

    @property
    def complete(self) -> bool:
        """Whether all cases were done."""
        return self.done == self.of


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a case could not be run; `of_data`: for the data, which all cases share."""

    why: str
    of_data: bool = False


def processes_for(wanted: int, available_bytes: int | None = None) -> tuple[int, str]:
    """Say how many processes there is memory for, and if those are fewer than wanted, that in a sentence.

    >>> processes_for(4, available_bytes=1_100 << 20)
    (2, '4 processes would need 2.0 GiB of memory and 1.1 GiB is available; 2 are used')
    """
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    most = max(1, available // PROCESS_BYTES)
    if most >= wanted:
        return wanted, ""
    needed, free = (size / 2**30 for size in (wanted * PROCESS_BYTES, available))
    are = "is" if most == 1 else "are"
    return (
        most,
        f"{wanted} processes would need {needed:.1f} GiB of memory and {free:.1f} GiB is available; {most} {are} used",
    )


def reproduce(
    paper: Paper,
    asked: Asked,
    *,
    processes: int = 1,
    stopped: Stopped = lambda: False,
    progress: Progress = lambda done, of: None,
) -> Reproduced:
    """Run a paper's cases, and conclude.

    Raises:
        BadData: the data that was given cannot be used.
        CaseFailed: a case could not be run; no other is waited for.
    """
    begin = time.monotonic()
    asked.data.check()
    cases = paper.cases(asked)
    figures = _run(cases, processes, stopped, progress)
    findings = paper.findings(asked, Done(figures))
    return Reproduced(paper, asked, findings, len(figures), len(cases), time.monotonic() - begin)


def _run(
    cases: Sequence[Case], processes: int, stopped: Stopped, progress: Progress
) -> dict[tuple[str, str, int], Figures]:
    found: dict[tuple[str, str, int], Figures] = {}
    progress(0, len(cases))
    with workers(_done, min(processes, max(1, len(cases))), stopped) as answers:
        for case, answer in answers(deque(cases)):
            if isinstance(answer, _Failure) and answer.of_data:
                raise BadData(answer.why)
            if isinstance(answer, Broken | _Failure):
                raise CaseFailed(f"{case}: {answer.why}")
            if answer is not None:
                found[case.workload, case.arm, case.seed] = answer
            progress(len(found), len(cases))
    return found


def _done(case: Case, stopped: Stopped) -> Figures | _Failure | None:
    try:
        return case.work.run(stopped)
    except (BadData, BadTrace) as error:
        return _Failure(str(error), of_data=True)
    except Exception as error:  # a policy's, or a trace's: the case that it was is told where all are
        return _Failure(f"{type(error).__name__}: {error}")
