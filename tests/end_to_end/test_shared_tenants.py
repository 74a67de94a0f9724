"""A real mesh on which one tenant has thousands of tasks: another tenant's job still starts promptly."""

from __future__ import annotations

import pytest
from benchmarks.shared_tenants import run

START_SECONDS_MAX = 15.0  # on a loaded machine; the tasks before it take minutes


@pytest.mark.deep
async def test_a_job_of_another_tenant_does_not_wait_for_thousands_of_tasks() -> None:
    load = await run(3, 2_000, after_seconds=0.0, start_seconds_max=START_SECONDS_MAX)
    assert load.waited < START_SECONDS_MAX, load.outlook
    assert "less than 1 s" not in load.outlook.splitlines()[-1], "thousands are ahead of the last task"
