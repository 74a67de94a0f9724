"""The status of jobs' objectives, for `--json`, tables and cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cotenant.cli import units
from cotenant.core.model.objective import in_span
from cotenant.v1.job_pb2 import ObjectiveKind, ObjectiveState, ObjectiveStatus

View = dict[str, Any]
LOST = ("at_risk", "missed")


def objective_view(status: ObjectiveStatus) -> View:
    """Return the status of an objective; of a deadline, target and value are times."""
    kind = _word(ObjectiveKind, "OBJECTIVE_KIND_", status.kind)

    def figure(number: float | None) -> float | str | None:
        if kind != "deadline" or number is None:
            return number
        return units.format_time(number) if units.has_date(number) else None

    return {
        "kind": kind,
        "state": _word(ObjectiveState, "OBJECTIVE_STATE_", status.state),
        "final": status.final,
        "target": figure(status.target),
        "value": figure(status.value if status.HasField("value") else None),
        "margin": status.margin if status.HasField("margin") else None,
        "detail": status.detail,
        "remedy": status.remedy or None,
    }


def _word(enum: Any, prefix: str, number: int) -> str:
    """Return the word for a number; one that only a newer server knows stays a number."""
    return enum.Name(number).removeprefix(prefix).lower() if number in enum.values() else f"number {number}"


def objectives_cell(views: Sequence[View]) -> str:
    """Return the cell of a table: the state of each objective, and by how much it is kept or not.

    >>> view = {"kind": "deadline", "state": "at_risk", "margin": -2400.0}
    >>> objectives_cell([view]), objectives_cell([view, {"kind": "rate", "state": "met", "margin": 0.4}])
    ('at risk −40 min', 'deadline at risk −40 min, rate met +0.4/s')
    """
    cells = [f"{view['state'].replace('_', ' ')}{_margin(view)}" for view in views]
    if len(views) > 1:
        cells = [f"{view['kind']} {cell}" for view, cell in zip(views, cells, strict=True)]
    return ", ".join(cells) or "-"


def _margin(view: View) -> str:
    margin, kind = view["margin"], view["kind"]
    if margin is None:
        return ""
    sign, size = "−" if margin < 0 else "+", abs(margin)
    text = {"deadline": in_span(size), "rate": f"{size:.3g}/s"}.get(kind, f"{1000 * size:.3g} ms")
    return f" {sign}{text}"


def objective_lines(views: Iterable[View]) -> list[str]:
    """Return a line for each objective: its state, the numbers, and what would help.

    >>> objective_lines([{"state": "at_risk", "detail": "expected 40 min late", "remedy": "a later deadline"}])
    ['at risk: expected 40 min late; what would help: a later deadline']
    """
    return [
        f"{view['state'].replace('_', ' ')}: {view['detail']}"
        + (f"; what would help: {view['remedy']}" if view["remedy"] else "")
        for view in views
    ]


def warnings_of(statuses: Iterable[ObjectiveStatus]) -> list[str]:
    """Return what to warn of at submission: the objectives that are not expected to be kept."""
    lost = [view for view in map(objective_view, statuses) if view["state"] in LOST]
    return [view["detail"] + (f"; what would help: {view['remedy']}" if view["remedy"] else "") for view in lost]
