"""The usage ledger: what it counts depends on when resources were held, not on when that was reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.resources import NOTHING, Resources
from cotenant.core.scheduling import usage_ledger
from cotenant.core.scheduling.decayed_usage import DecayedUsage
from cotenant.core.scheduling.usage_ledger import TenantUsage, UsageLedger

HALF_LIFE = 1000.0
NOW = 10_000.0
GPU = Resources(1000, 4, 2**30)
moments = st.integers(0, int(NOW)).map(float)
jobs = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["ann", "bob"]), moments, moments, moments, moments)


def expected(done: list[tuple[str, str, float, float]], tenant: str, user: str = "") -> tuple[float, ...]:
    usage = DecayedUsage(HALF_LIFE, NOW)
    for of, by, since, until in done:
        if of == tenant and user in ("", by):
            usage = usage.charged(GPU, since, until)
    return usage.amounts


@given(st.lists(jobs, max_size=6))
def test_late_reports_change_nothing(drawn: list[tuple[str, str, float, float, float, float]]) -> None:
    ledger, done, steps = UsageLedger(HALF_LIFE), [], []
    for number, (tenant, user, *times) in enumerate(drawn):
        since, started, until, stopped = sorted(times)
        if number % 2:  # the start is reported after the next event, too
            started = since
        done.append((tenant, user, since, until))
        steps.append((started, number, "start", tenant, user, since))
        steps.append((stopped, number, "stop", tenant, user, until))
    for now, number, step, tenant, user, at in sorted(steps, key=lambda one: (one[0], one[2] == "stop", one[1])):
        if step == "start":
            ledger.start(f"{number}", tenant, user, GPU, since=at, now=now)
        else:
            ledger.stop(f"{number}", until=at, now=now)
    for tenant in ("a", "b"):
        usage = ledger.usage(tenant, NOW)
        assert usage.own.amounts == pytest.approx(expected(done, tenant), rel=1e-6, abs=1.0)
        for user, own in usage.users.items():
            assert own.amounts == pytest.approx(expected(done, tenant, user), rel=1e-6, abs=1.0)


@given(moments, moments, moments)
def test_what_a_record_counts_is_not_counted_again(one: float, other: float, recorded: float) -> None:
    since, until = sorted((one, other))
    whole = UsageLedger(HALF_LIFE)
    whole.charge("a", "ann", GPU, (since, until), NOW)
    first = UsageLedger(HALF_LIFE)
    if since < recorded:
        first.start("job", "a", "ann", GPU, since=since, now=since)
        if until < recorded:
            first.stop("job", until=until, now=until)
    restarted = UsageLedger(HALF_LIFE)
    restarted.restore("a", first.usage("a", recorded))
    restarted.charge("a", "ann", GPU, (since, until), NOW)
    assert restarted.usage("a", NOW).own.amounts == pytest.approx(whole.usage("a", NOW).own.amounts, rel=1e-9, abs=1e-3)


def test_a_resized_job_is_charged_for_what_it_holds() -> None:
    ledger = UsageLedger(HALF_LIFE)
    ledger.start("job", "a", "ann", GPU, since=0.0, now=0.0)
    ledger.change("job", GPU + GPU, at=100.0, now=150.0)
    ledger.change("job", GPU + GPU, at=160.0, now=160.0)
    ledger.stop("job", until=200.0, now=200.0)
    usage = DecayedUsage(HALF_LIFE).advanced(100.0, GPU).advanced(200.0, GPU + GPU)
    assert ledger.usage("a", 200.0).own.amounts == pytest.approx(usage.amounts)
    assert not ledger.charges("job")


def test_a_clock_that_was_set_back_takes_nothing_away() -> None:
    ledger = UsageLedger(HALF_LIFE)
    ledger.start("job", "a", "ann", GPU, since=100.0, now=100.0)
    ledger.stop("job", until=200.0, now=200.0)
    before = ledger.usage("a", 200.0)
    assert ledger.usage("a", 150.0) == before
    ledger.start("next", "a", "ann", GPU, since=140.0, now=150.0)
    assert ledger.usage("a", 200.0).own.amounts > before.own.amounts


def test_only_the_largest_users_are_kept_and_the_tenant_keeps_its_whole_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_ledger, "USERS_MAX", 2)
    ledger = UsageLedger(HALF_LIFE)
    for number, user in enumerate(["ann", "bob", "eve", "joe"], 1):
        ledger.charge("a", user, GPU, (0.0, 10.0 * number), NOW)
    usage = ledger.usage("a", NOW)
    assert set(usage.users) == {"eve", "joe"}
    assert usage.own.amounts[0] > sum(one.amounts[0] for one in usage.users.values())


def test_averages_have_a_column_for_each_tenant_and_nothing_for_unknown_ones() -> None:
    ledger = UsageLedger(HALF_LIFE)
    ledger.restore("a", TenantUsage(DecayedUsage(HALF_LIFE, 0.0).advanced(60 * HALF_LIFE, GPU)))
    averages = ledger.averages(["x", "a"], 60 * HALF_LIFE)
    assert averages[:, 0].tolist() == list(NOTHING)
    assert averages[:, 1] == pytest.approx(list(GPU))
