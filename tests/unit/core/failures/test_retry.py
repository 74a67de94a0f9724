from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.failures.classifier import Failure
from cotenant.core.failures.retry import RetryRules, Tries, decide
from cotenant.core.failures.rules import Responsibility

RULES = RetryRules()
failures = st.builds(
    Failure,
    failure_class=st.just("x"),
    blame=st.sampled_from(Responsibility),
    transient=st.booleans(),
    node_at_fault=st.booleans(),
)
tries = st.builds(Tries, st.integers(0, 200), st.integers(0, 100), st.integers(0, 10))
draws = st.floats(0, 1)


@given(failures, tries, draws)
def test_a_user_is_never_retried_and_no_budget_is_exceeded(failure: Failure, tries: Tries, draw: float) -> None:
    retry = decide(failure, tries, RULES, draw)
    if failure.blame is Responsibility.USER:
        assert not retry.again
    if retry.again and retry.counts:
        assert tries.failures < tries.retries_max
    if not retry.counts:
        assert retry.again
        assert failure.blame is Responsibility.INFRASTRUCTURE
        assert tries.infrastructure_failures < RULES.infrastructure_retries
    assert 0 <= retry.wait_seconds <= RULES.back_off_seconds_max
    assert retry.left >= 0
    assert decide(failure, tries, RULES, draw) == retry


@given(failures, tries, draws)
def test_a_node_is_avoided_where_it_is_at_fault_alone(failure: Failure, tries: Tries, draw: float) -> None:
    retry = decide(replace(failure, blame=Responsibility.INFRASTRUCTURE), tries, RULES, draw)
    assert retry.avoid_node_seconds == (3600.0 if failure.node_at_fault else 0.0)


def test_waits_double_from_ten_seconds_to_ten_minutes_and_are_spread() -> None:
    reset = Failure("network_error", Responsibility.INFRASTRUCTURE, transient=True)
    waits = [decide(reset, Tries(count, 100, 3), RULES, 1.0).wait_seconds for count in range(6)]
    assert waits == [80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    first = [decide(reset, Tries(0, 0), RULES, draw).wait_seconds for draw in (0.0, 0.5, 1.0)]
    assert first == [5.0, 7.5, 10.0]


def test_what_nobody_can_tell_waits_as_the_user_is_used_to() -> None:
    waits = [decide(Failure(), Tries(count, 100), RULES, 0.0).wait_seconds for count in range(10)]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
