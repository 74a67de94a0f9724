"""A live mesh and a simulation of its snapshot decide alike, and the comparison notices a mesh that does not."""

from __future__ import annotations

from unittest import mock

import pytest
from tests.support.properties import amount
from tests.verification.decisions.comparison import differences

from cotenant.core.model.refusal import Code
from cotenant.services.queue.scheduling import scheduler
from cotenant.services.queue.scheduling.tenant_usage import OwnVictims

WORLDS = amount(8, deep=40)


@pytest.mark.parametrize("seed", range(WORLDS))
async def test_a_live_mesh_decides_as_a_simulation_of_its_snapshot(seed: int) -> None:
    assert await differences(seed) == []


async def test_resources_are_reclaimed_without_a_reservation() -> None:
    assert await differences(8499) == []


async def test_a_job_that_may_borrow_is_not_refused_for_one_that_may_not() -> None:
    assert await differences(480) == []


@pytest.mark.parametrize("seed", [72, 219, 229])
async def test_what_an_earlier_page_started_stays_for_the_later_ones(seed: int) -> None:
    assert await differences(seed) == []


async def test_a_reservation_counts_on_the_end_of_a_job_that_waits_for_its_room() -> None:
    assert await differences(5224) == []


async def test_a_queue_that_stops_at_places_being_freed_is_noticed() -> None:
    with mock.patch.object(scheduler, "PASSED_BY", (Code.NEVER_FITS, Code.QUOTA)):
        assert await differences(10591)


async def test_a_queue_that_ignores_a_tenants_own_victims_is_noticed() -> None:
    with mock.patch.object(OwnVictims, "make_room", return_value=False):
        assert await differences(1014)
