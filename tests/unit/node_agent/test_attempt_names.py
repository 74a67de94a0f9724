"""Names of attempts' directories and control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.node_agent.runtime.attempt_directory import key_of
from cotenant.node_agent.runtime.attempt_status import AttemptKey


@pytest.mark.parametrize("name", ["work", "-1", "job-", "job-one", "job--", "job-²", "job-" + "9" * 5000])
def test_names_that_are_not_attempts_are_skipped(name: str) -> None:
    assert key_of(Path(name)) is None


def test_an_attempt_is_identified_by_its_name() -> None:
    assert key_of(Path("a-job-12")) == AttemptKey("a-job", 12)
