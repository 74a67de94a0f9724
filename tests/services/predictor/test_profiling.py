from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.services.predictor.profiling import POINTS_ENOUGH, Measured, plan

KIND = ("ann", "bert", "", 1000, 1)
CORES = st.integers(1, 256)


@given(st.sets(CORES), CORES)
def test_a_plan_holds_new_counts_within_range_until_enough_are_known(known: set[int], cores_max: int) -> None:
    planned = plan(known, cores_max)
    within = {cores for cores in known if cores <= cores_max}
    assert len(set(planned)) == len(planned)
    assert within.isdisjoint(planned)
    assert all(1 <= cores <= cores_max for cores in planned)
    assert len(within) + len(planned) >= min(POINTS_ENOUGH, cores_max)
    assert not planned or len(within) + len(planned) <= POINTS_ENOUGH


@given(st.sets(CORES, max_size=3), CORES)
def test_the_most_cores_come_first(known: set[int], cores_max: int) -> None:
    planned = plan(known - {cores_max}, cores_max)
    assert planned[:1] in ([], [cores_max])


@given(st.sets(CORES), CORES)
def test_measuring_as_planned_follows_the_plan(known: set[int], cores_max: int) -> None:
    planned = plan(known, cores_max)
    for index, cores in enumerate(planned):
        known |= {cores}
        assert plan(known, cores_max) == planned[index + 1 :]


def test_what_was_measured_survives_a_dump_and_a_restore() -> None:
    before, after = Measured(), Measured()
    for cores in (4, 8, 4):
        before.saw(KIND, cores)
    assert after.restore(before.dump()) == []
    assert set(after.at(KIND)) == {4, 8}
    assert before.dump() == {}, "nothing changed since"


def test_records_that_cannot_be_read_are_named_and_leave_nothing_behind() -> None:
    measured = Measured()
    bad = {"a": b"", "b": b"{", "c": b"[1]", "d": b'{"cores": [0]}', "e": b'{"cores": ["4"]}', "f": b"[" * 100_000}
    assert measured.restore(bad | {"ann/bert/1000/1": b'{"cores": [4]}'}) == list(bad)
    assert set(measured.at(KIND)) == {4}


def test_the_kind_unused_for_longest_is_forgotten_and_its_record_with_it() -> None:
    measured = Measured(kinds_max=2)
    kinds = [("ann", model, "", 1000, 1) for model in "abc"]
    for kind in (*kinds[:2], kinds[0], kinds[2]):
        measured.saw(kind, 4)
    assert [set(measured.at(kind)) for kind in kinds] == [{4}, set(), {4}]
    assert measured.dump()["ann/b/1000/1"] == b""
