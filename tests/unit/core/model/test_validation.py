from __future__ import annotations

import pytest

from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.validation import check_spec


@pytest.mark.parametrize(
    ("gpu_type", "sound"),
    [("V100M16|V100M32", True), ("T4 | A100", True), ("T4|", False), ("|", False), ("T4||P100", False)],
)
def test_a_gpu_type_may_be_one_of_several_each_with_a_name(gpu_type: str, sound: bool) -> None:
    spec = JobSpec(command=("true",), roles=(Role(request=Request(1000, gpu_type=gpu_type)),))
    found = [violation.field for violation in check_spec(spec)]
    assert found == ([] if sound else ["spec.roles[0].resources.gpu_type"])
