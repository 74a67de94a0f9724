"""The record of predictions of jobs that have ended, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.cli.prediction_record import Key
from cotenant.cli.render import Column
from cotenant.core.prediction.track_record import TrackRecord

COLUMNS = (
    Column("PREDICTOR", elastic=True),
    Column("TENANT", elastic=True),
    Column("JOBS", right=True),
    Column("OFF BY", right=True),
    Column("WITHIN 2×", right=True),
    Column("BIAS", right=True),
    Column("EXPLAINED", right=True),
)
LEGEND = (
    "OFF BY: half of the predictions were off by at most this factor; BIAS: the median of predicted / real run time",
    "EXPLAINED: the share of the squared error (of log run time) that predictions take away; below 0 they mislead",
)
EQUAL_JOBS = "no EXPLAINED for {}: the jobs ran nearly equally long, so there is no difference to explain"
EXPLAINED_JOBS_MIN = 10  # of fewer jobs, the share is mostly chance


def notes(found: Mapping[Key, TrackRecord]) -> list[str]:
    """Return the remarks below a table of records."""
    equal = [f"{key[0]}{f' ({key[1]})' * bool(key[1])}" for key, record in found.items() if _runs_equal(record)]
    return [*LEGEND, *([EQUAL_JOBS.format(", ".join(equal))] if equal else [])] if found else []


def _runs_equal(record: TrackRecord) -> bool:
    return record.explained is None and record.jobs >= EXPLAINED_JOBS_MIN


def row(key: Key, record: TrackRecord) -> tuple[str, ...]:
    """Return one record as a row of the table."""
    return (
        key[0],
        key[1] or "all",
        str(record.jobs),
        f"{record.median_factor:.2f}×",
        f"{100 * record.within_twice:.0f} %",
        f"{record.bias:.2f}",
        "" if record.explained is None or record.jobs < EXPLAINED_JOBS_MIN else f"{100 * record.explained:.0f} %",
    )
