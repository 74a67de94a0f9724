"""What is spare for a running job, and what an allocator may answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.core.capacity.ledger import Holding, Share
from cotenant.core.model.estimate import UNKNOWN
from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.resize import BadSizing, ResizableJob, resizable, resized, validated_cores


def running(cores: tuple[int, ...] = (4, 1), spare: tuple[int, ...] = (2, 0)) -> ResizableJob:
    roles = (Role("worker", request=Request(gpu_milli=1000)), Role("ps", request=Request(cores=1)))
    return ResizableJob("a", JobSpec(roles=roles), UNKNOWN, cores, spare)


def test_an_allocator_may_take_what_is_spare_and_give_back_all_but_one_core() -> None:
    assert validated_cores(running(), Sizing((6, 1), "")) == (6, 1)
    assert validated_cores(running(), Sizing((1, 1), "")) == (1, 1)
    assert validated_cores(running(), Sizing((4, 1), "")) is None
    assert validated_cores(running(), None) is None


@pytest.mark.parametrize(
    ("cores", "why"),
    [((7, 1), "spare"), ((0, 1), "needs a core"), ((4, 2), "user asked"), ((4,), "does not match its roles")],
)
def test_an_invalid_sizing_is_rejected_with_the_reason(cores: tuple[int, ...], why: str) -> None:
    with pytest.raises(BadSizing, match=why):
        validated_cores(running(), Sizing(cores, ""))


def test_a_resize_changes_only_cores() -> None:
    places, held = (
        [Share(3, 1, 2), Share(1, 0, 1)],
        [Holding(3, 2, 8, memory_bytes=5), Holding(1, cores=1, shares=((0, 500),))],
    )
    assert resized(places, held, (7, 3)) == (Holding(3, 2, 6, memory_bytes=5), Holding(1, cores=7, shares=((0, 500),)))


@pytest.mark.parametrize(
    ("kind", "gpu_milli", "cores", "expected"),
    [
        (JobKind.TRAINING, 1000, None, True),
        (JobKind.TRAINING, 1000, 4, False),
        (JobKind.TRAINING, 0, None, False),
        (JobKind.CPU, 1000, None, False),
    ],
)
def test_cores_change_only_if_they_are_open_and_there_are_gpus_to_keep_busy(
    kind: JobKind, gpu_milli: int, cores: int | None, expected: bool
) -> None:
    assert resizable(JobSpec(kind=kind, roles=(Role("worker", 1, Request(gpu_milli, cores)),))) == expected


def test_a_job_owns_what_it_holds_but_for_what_is_lent_to_it() -> None:
    assert running((4, 1)).own == 4
    assert replace(running((4, 1)), lent=(3, 0)).own == 1
    assert replace(running((4, 1)), lent=(0, 0)).own == 4
