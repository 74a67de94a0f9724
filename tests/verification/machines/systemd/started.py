"""The machine of `installed.py`, shut down cleanly and started again: everything starts by itself."""

from __future__ import annotations

import pytest
from tests.verification.machines.systemd.operator import UNITS, cotenant, counted, journal, shown, told, troubles, until

pytestmark = pytest.mark.root


def test_all_units_start_by_themselves() -> None:
    for unit in UNITS:
        until(lambda unit=unit: shown(unit, "ActiveState") == "active", unit)  # type: ignore[misc]  # bound at once
    until(lambda: cotenant("health"), "health of all")
    until(lambda: [node["state"] for node in told("nodes")] == ["ready"], "node that is ready")


def test_the_job_that_ran_when_the_machine_went_off_runs_again() -> None:
    (job,) = told("jobs")
    until(lambda: told("show", job["id"])["attempt"]["number"] == 2, "second attempt")
    until(lambda: counted(job["id"]), "job that counts")
    cotenant("cancel", job["id"])


def test_neither_boot_has_errors_in_its_journal() -> None:
    assert "Stopped Cotenant" in journal("-b", "-1") or "Stopped cotenant" in journal("-b", "-1")
    assert troubles("-b", "-1") == []
    assert troubles("-b", "0") == []
