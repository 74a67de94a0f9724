from __future__ import annotations

import pytest

from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.validation import (
    CORES_MAX,
    GPU_MILLI_MAX,
    MEMORY_BYTES_MAX,
    MEMORY_BYTES_MIN,
    check_spec,
)


@pytest.mark.parametrize(
    ("gpu_type", "sound"),
    [("V100M16|V100M32", True), ("T4 | A100", True), ("T4|", False), ("|", False), ("T4||P100", False)],
)
def test_a_gpu_type_may_be_one_of_several_each_with_a_name(gpu_type: str, sound: bool) -> None:
    spec = JobSpec(command=("true",), roles=(Role(request=Request(1000, gpu_type=gpu_type)),))
    found = [violation.field for violation in check_spec(spec)]
    assert found == ([] if sound else ["spec.roles[0].resources.gpu_type"])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(1000, 1), ""),
        (Request(1000, CORES_MAX), ""),
        (Request(1000, 0), "cores"),
        (Request(1000, CORES_MAX + 1), "cores"),
        (Request(GPU_MILLI_MAX), ""),
        (Request(GPU_MILLI_MAX + 1000), "gpu_milli"),
        (Request(1500), "gpu_milli"),
        (Request(1000, 1, MEMORY_BYTES_MIN), ""),
        (Request(1000, 1, MEMORY_BYTES_MIN - 1), "memory_bytes"),
        (Request(1000, 1, MEMORY_BYTES_MAX), ""),
        (Request(1000, 1, MEMORY_BYTES_MAX + 1), "memory_bytes"),
    ],
)
def test_a_request_may_be_as_small_and_as_large_as_its_bounds(request_: Request, field: str) -> None:
    found = [one.field for one in check_spec(JobSpec(command=("true",), roles=(Role(request=request_),)))]
    assert found == ([f"spec.roles[0].resources.{field}"] if field else [])
