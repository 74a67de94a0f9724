"""Lifting a limit of a job field, so that a test need not wait as long as the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.core.model import job_fields


def lift(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Accept every value of a field during a test."""
    lifted = tuple(replace(field, limit=None) if field.key == key else field for field in job_fields.JOB)
    assert lifted != job_fields.JOB
    monkeypatch.setattr(job_fields, "JOB", lifted)
