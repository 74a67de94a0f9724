"""Figures about similar jobs, against those computed from all ends so far."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.policies.lightgbm_duration.finished_jobs import End, Facts
from cotenant.policies.lightgbm_duration.recurrence import LATEST, LEVELS, LONG, RecurrenceTable, keys_of


def facts(tenant: str = "ann", kind: str = "bert", gpus: float = 1.0, submitter: str = "ann", name: str = "") -> Facts:
    shape = f"{gpus:g} worker"
    return (
        ("tenant", tenant),
        ("kind", kind),
        ("gpus", gpus),
        ("shape", shape),
        ("submitter", submitter),
        ("name", name),
    )


names = st.sampled_from(["ann", "bob"])
jobs = st.builds(facts, names, st.sampled_from(["bert", "gnmt"]), st.sampled_from([1.0, 2.0]), names, names)
ends = st.builds(
    lambda about, submitted, ran, odd: End(about, submitted, math.nan, ran, odd),
    jobs,
    st.sampled_from([math.nan, 5.0, 10.0, 10.0, 500.0]),
    st.sampled_from([1.0, 50.0, 60.0, 70.0, 150.0, 151.0, 9000.0]),
    st.sampled_from([None, None, None, True, False]),
)


class ByHand:
    """The slow twin: keeps all ends, and goes through them for each figure."""

    def __init__(self) -> None:
        self.ends: list[tuple[End, bool | None]] = []  # with whether each was a surprise
        self.shares: dict[Hashable, float] = {}

    def of(self, key: Hashable) -> list[tuple[End, bool | None]]:
        return [one for one in self.ends if key in keys_of(one[0].facts)]

    def learn(self, end: End) -> None:
        kind = [math.log(one.run_seconds) for one, _ in self.of(keys_of(end.facts)[2])]
        odd = end.surprising
        if odd is None and len(kind) >= 3:
            odd = abs(math.log(end.run_seconds) - float(np.median(kind))) > math.log(3)
        self.ends.append((end, odd))
        share = 0.2
        for key in reversed(keys_of(end.facts)):
            judged = [seen for _, seen in self.of(key) if seen is not None]
            share = self.shares[key] = (sum(judged) + 4 * share) / (len(judged) + 4)

    def row(self, key: Hashable) -> list[float]:
        there = [one for one, _ in self.of(key)]
        if not there:
            return [0.0, *[math.nan] * 12]
        logs = [math.log(one.run_seconds) for one in there]
        submitted = [one.ended_seconds if math.isnan(one.submitted_seconds) else one.submitted_seconds for one in there]
        newest = sorted(zip(submitted, logs, strict=True))[-3:]
        return [
            *(math.log(1 + len(there)), logs[-1], there[-1].ended_seconds),
            *(newest[-1][1], sum(figure for _, figure in newest) / len(newest), newest[-1][0]),
            *np.quantile(logs[-LATEST:], [0.1, 0.5, 0.9]),
            *np.quantile(logs[-LONG:], [0.1, 0.5, 0.9]),
            self.shares[key],
        ]


def same(rows: Sequence[Sequence[float]]) -> object:
    return pytest.approx(np.array(rows), nan_ok=True)


@settings(max_examples=examples(30))
@given(st.lists(ends, max_size=45), jobs)
def test_each_level_has_the_figures_of_all_earlier_ends_that_share_its_facts(seen: list[End], asked: Facts) -> None:
    table, slow = RecurrenceTable(), ByHand()
    for number, one in enumerate(seen):
        end = End(one.facts, one.submitted_seconds, 20.0 * number, one.run_seconds, one.surprising)
        table.learn(end)
        slow.learn(end)
    assert table.rows(table.slots(asked)) == same([slow.row(key) for key in keys_of(asked)])


def test_only_the_latest_thousand_run_times_count_and_only_32_for_the_short_quantiles() -> None:
    table, slow = RecurrenceTable(), ByHand()
    for number in range(LONG + 40):
        end = End(facts(), 0.0, float(number), math.exp((number * 37 % 101) / 10), False)
        table.learn(end)
        slow.ends.append((end, False))
    slow.shares = dict.fromkeys(keys_of(facts()), math.nan)
    found = table.rows(table.slots(facts()))[:, :-1]
    assert found == same([slow.row("all")[:-1]] * len(LEVELS))


def test_the_key_unused_for_longest_is_dropped_and_its_row_is_used_again() -> None:
    table = RecurrenceTable(keys_max=8)
    first, second = facts(name="a"), facts(name="b")  # which share five of six keys
    for number, about in enumerate((first, second, first)):
        table.learn(End(about, 0.0, float(number), 10.0 * (number + 1), False))
    assert all(table.slots(first))
    third = facts(tenant="bob")  # five keys of its own, for which there is one free row
    table.learn(End(third, 0.0, 9.0, 99.0, False))
    assert [bool(slot) for slot in table.slots(first)] == [True, True, False, False, False, True]
    assert [bool(slot) for slot in table.slots(second)] == [False, True, False, False, False, True]
    assert np.isnan(table.rows(table.slots(second))[0, 1:]).all()
    assert sorted({*table.slots(first), *table.slots(third)}) == list(range(9))
