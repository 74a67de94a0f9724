"""What the Python API tells of a job: plain values, and tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cotenant.cli import views
from cotenant.cli.jobs.job_lines import outcome_line, phase_line
from cotenant.cli.name_lookup import phase_of
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.v1.job_pb2 import Job as JobMessage

COLUMNS = ("id", "name", "phase", "detail")


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job when it was read. `details` has everything, with the keys of `cotenant show --json`."""

    id: str
    name: str
    phase: str
    detail: str  # on one line: where it runs, why it waits, or how it ended
    nodes: tuple[str, ...]
    exit_code: int | None
    details: Mapping[str, Any] = field(repr=False)

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.phase in ENDED

    @property
    def succeeded(self) -> bool:
        """Whether the job has succeeded."""
        return self.phase == Phase.SUCCEEDED

    def _repr_html_(self) -> str:
        return html_table([self])


def status_of(job: JobMessage, now: float) -> JobStatus:
    """Return the status of a job as the queue knows it."""
    details = views.job_view(job, now)
    ended = phase_of(job) in ENDED
    decided = ended and job.attempt.HasField("exit") and not job.attempt.exit.signal
    return JobStatus(
        id=job.id,
        name=job.spec.name,
        phase=str(phase_of(job)),
        detail=outcome_line(job) if ended else phase_line(job),
        nodes=tuple(details["nodes"]),
        exit_code=job.attempt.exit.code if decided else None,
        details=details,
    )


def html_table(statuses: Iterable[JobStatus]) -> str:
    """Return jobs as an HTML table; names and reasons are escaped, for their authors are other people.

    >>> html_table([JobStatus("j1", "<b>", "queued", "queued", (), None, {})])[-84:]
    '<tr><td>j1</td><td>&lt;b&gt;</td><td>queued</td><td>queued</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(getattr(one, column)))}</td>" for column in COLUMNS) + "</tr>"
        for one in statuses
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
