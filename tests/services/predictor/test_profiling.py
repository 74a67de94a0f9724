from __future__ import annotations

from cotenant.core.curves import Point
from cotenant.services.predictor.profiling import GPU_TYPES_MAX, RATES_MAX, Measured

KIND = ("ann", "bert", "", 1000, 1)


def test_what_was_measured_survives_a_dump_and_a_restore() -> None:
    before, after = Measured(), Measured()
    for cores, rate in ((4, 10.0), (8, 15.0), (4, 12.0)):
        before.saw(KIND, "", cores, rate)
    assert after.restore(before.dump()) == []
    assert after.at(KIND, "") == before.at(KIND, "")
    assert [(point.cores, point.rate, point.windows) for point in after.at(KIND, "")] == [(4, 11.0, 2), (8, 15.0, 1)]
    assert before.dump() == {}, "nothing changed since"


def test_gpu_types_are_kept_apart_and_the_one_seen_most_serves_where_none_is_wanted() -> None:
    measured = Measured()
    for gpu_type, rate in (("A100", 9.0), ("T4", 3.0), ("T4", 3.0)):
        measured.saw(KIND, gpu_type, 4, rate)
    assert measured.at(KIND, "A100") == [Point(4, 9.0)]
    assert measured.at(KIND, "") == measured.at(KIND, "T4") == [Point(4, 3.0, windows=2)]
    assert measured.at(KIND, "H100") == []
    for number in range(GPU_TYPES_MAX):
        measured.saw(KIND, f"new-{number}", 4, 1.0)
    assert measured.at(KIND, "A100") == [], "the oldest makes room"


def test_a_job_without_cores_of_its_own_tells_nothing() -> None:
    measured = Measured()
    measured.saw(KIND, "", 0, 5.0)
    assert (measured.at(KIND, ""), measured.dump()) == ([], {})


def test_only_the_latest_rates_count() -> None:
    measured = Measured()
    for rate in (*[1.0] * 5, *[3.0] * RATES_MAX):
        measured.saw(KIND, "", 4, rate)
    assert measured.at(KIND, "") == [Point(4, 3.0, windows=RATES_MAX)]


def test_records_that_cannot_be_read_are_named_and_leave_nothing_behind() -> None:
    measured = Measured()
    bad = {
        "a": b"",
        "b": b"{",
        "c": b"[1]",
        "d": b'{"rates": [["", 0, [1]]]}',
        "e": b'{"rates": [["", "x", [1]]]}',
        "f": b"[" * 100_000,
        "g": b'{"rates": [["", 4, [NaN]]]}',
        "h": b'{"rates": [["", 4, [-1]]]}',
        "i": b'{"rates": [["", 4, 7]]}',
        "j": b'{"rates": [["", null, [1]]]}',
        "k": b'{"cores": [4]}',
        "l": b'{"rates": [["", 1e999, [1]]]}',
    }
    assert measured.restore(bad | {"ann/bert/1000/1": b'{"rates": [["", 4, [2.5]]]}'}) == list(bad)
    assert measured.at(KIND, "") == [Point(4, 2.5)]


def test_the_kind_unused_for_longest_is_forgotten_and_its_record_with_it() -> None:
    measured = Measured(kinds_max=2)
    kinds = [("ann", model, "", 1000, 1) for model in "abc"]
    for kind in (*kinds[:2], kinds[0], kinds[2]):
        measured.saw(kind, "", 4, 1.0)
    assert [len(measured.at(kind, "")) for kind in kinds] == [1, 0, 1]
    assert measured.dump()["ann/b/1000/1"] == b""
