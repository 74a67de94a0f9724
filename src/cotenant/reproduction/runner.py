"""Runs a paper's cases in several processes, and keeps finished cases if it is stopped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil

from cotenant.reproduction.cache import CaseResult, ResultCache
from cotenant.reproduction.model import Asked, BadData, Case, Done, Findings, Paper, Stopped
from cotenant.simulator.process_pool import WorkerDied, workers
from cotenant.simulator.traces import BadTrace

PROCESS_BYTES = 500 << 20  # measured need of the largest case
Progress = Callable[[int, int], None]


class CaseFailed(Exception):
    """A case could not be run; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A paper with its findings; `complete` False: stopped early, and the findings cover the finished cases.

    `kept`: number of cases from earlier runs. `processor_seconds` are those of all cases, including these.
    """

    paper: Paper
    asked: Asked
    findings: Findings
    done: int
    of: int
    wall_seconds: float
    processor_seconds: float = 0.0
    kept: int = 0

    @property
    def complete(self) -> bool:
        """Whether all cases have finished."""
        return self.done == self.of


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a case could not be run; `of_data`: because of the data, which all cases share."""

    why: str
    of_data: bool = False


def processes_for(wanted: int, available_bytes: int | None = None) -> tuple[int, str]:
    """Return how many processes the memory allows, with a sentence if those are fewer than wanted.

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
    keep: Path | None = None,
    stopped: Stopped = lambda: False,
    progress: Progress = lambda done, of: None,
) -> Reproduced:
    """Run a paper's cases and return its findings. `keep`: a directory that caches figures between runs.

    Raises:
        BadData: the given data is unusable.
        BadDirectory: figures cannot be cached there.
        CaseFailed: a case could not be run; other cases are not awaited.
    """
    begin = time.monotonic()
    asked.data.check()
    cases, kept = paper.cases(asked), ResultCache(keep, paper.name, asked.data)
    ran = {case.key: before for case in cases if (before := kept.of(case))}
    known = len(ran)
    progress(known, len(cases))
    with closing(_run([case for case in cases if case.key not in ran], processes, stopped)) as answers:
        for case, one in answers:
            ran[case.key] = one
            kept.keep(case, one)
            progress(len(ran), len(cases))
    findings = paper.findings(asked, Done({key: one.figures for key, one in ran.items()}))
    processor_seconds = sum(one.processor_seconds for one in ran.values())
    passed = time.monotonic() - begin
    return Reproduced(paper, asked, findings, len(ran), len(cases), passed, processor_seconds, known)


def _run(cases: Sequence[Case], processes: int, stopped: Stopped) -> Generator[tuple[Case, CaseResult], None, None]:
    with workers(_done, min(processes, max(1, len(cases))), stopped) as answers:
        for case, answer in answers(deque(cases)):
            if isinstance(answer, _Failure) and answer.of_data:
                raise BadData(answer.why)
            if isinstance(answer, WorkerDied | _Failure):
                raise CaseFailed(f"{case}: {answer.why}")
            if answer is not None:
                yield case, answer


def _done(case: Case, stopped: Stopped) -> CaseResult | _Failure | None:
    begin = time.process_time()
    try:
        figures = case.work.run(stopped)
    except (BadData, BadTrace) as error:
        return _Failure(str(error), of_data=True)
    except Exception as error:  # a policy's or a trace's: the caller adds the case
        return _Failure(f"{type(error).__name__}: {error}")
    return CaseResult(figures, time.process_time() - begin) if figures else None
