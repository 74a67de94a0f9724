from __future__ import annotations

from cotenant.core.model.estimate import Candidate, Observation
from cotenant.core.prediction.core_curve import Point
from cotenant.core.prediction.drift import RATES_MAX
from cotenant.services.predictor.profiling.profile_store import SETTINGS_MAX, ProfileStore

JobClass = tuple[str, str, str, int, int]
KIND: JobClass = ("ann", "bert", "", 1000, 1)


def saw(
    profile_store: ProfileStore, cores: int, rate: float, *, kind: JobClass = KIND, gpu_type: str = "", phase: str = ""
) -> bool:
    """Record a window; return True if it voided all earlier rates."""
    held = Candidate(cores, 1000, 1, gpu_type)
    return profile_store.record(
        kind, Observation(*kind, held, rate_per_second=rate, window_seconds=9.0, phase=phase)
    ).void


def test_measured_rates_survive_dump_and_restore() -> None:
    before, after = ProfileStore(), ProfileStore()
    for cores, rate in ((4, 11.0), (8, 15.0), (4, 12.0)):
        saw(before, cores, rate)
    assert after.restore(before.dump()) == []
    assert after.at(KIND, "") == before.at(KIND, "")
    assert [(point.cores, point.rate, point.windows) for point in after.at(KIND, "")] == [(4, 11.5, 2), (8, 15.0, 1)]
    assert before.dump() == {}, "nothing changed since"


def test_gpu_types_are_separate_and_the_most_measured_is_the_default() -> None:
    profile_store = ProfileStore()
    for gpu_type, rate in (("A100", 9.0), ("T4", 3.0), ("T4", 3.0)):
        saw(profile_store, 4, rate, gpu_type=gpu_type)
    assert profile_store.at(KIND, "A100") == [Point(4, 9.0)]
    assert profile_store.at(KIND, "") == profile_store.at(KIND, "T4") == [Point(4, 3.0, windows=2)]
    assert profile_store.at(KIND, "H100") == []
    for number in range(SETTINGS_MAX):
        saw(profile_store, 4, 1.0, gpu_type=f"new-{number}")
    assert profile_store.at(KIND, "A100") == [], "the oldest makes room"


def test_a_job_without_cores_has_no_rates() -> None:
    profile_store = ProfileStore()
    saw(profile_store, 0, 5.0)
    assert (profile_store.at(KIND, ""), profile_store.dump()) == ([], {})


def test_only_the_latest_rates_count() -> None:
    profile_store = ProfileStore()
    for rate in (*[3.1] * 5, *[3.0] * RATES_MAX):
        saw(profile_store, 4, rate)
    assert profile_store.at(KIND, "") == [Point(4, 3.0, windows=RATES_MAX)]


def test_unreadable_records_are_named_and_leave_nothing_behind() -> None:
    profile_store = ProfileStore()

    def with_rates(rates: str, setting: str = '["", "", 1]', stale: str = '""') -> bytes:
        return f'{{"profiles": [{{"setting": {setting}, "stale": {stale}, "rates": {rates}}}]}}'.encode()

    bad = {
        "a": b"",
        "b": b"{",
        "c": b"[1]",
        "d": with_rates("[[0, 1, 1, [1]]]"),
        "e": with_rates('[["x", 1, 1, [1]]]'),
        "f": b"[" * 100_000,
        "g": with_rates("[[4, 1, 1, [NaN]]]"),
        "h": with_rates("[[4, 1, 1, [-1]]]"),
        "i": with_rates("[[4, 1, 1, 7]]"),
        "j": with_rates("[[null, 1, 1, [1]]]"),
        "k": b'{"cores": [4]}',
        "l": with_rates("[[4, 1, 1, [1e999]]]"),
        "m": with_rates("[[4, NaN, 1, [1]]]"),
        "n": with_rates("[[4, 0, 1, [1]]]"),
        "o": with_rates("[[4, 1, 1, [1]]]", setting='["", ""]'),
        "p": with_rates("[[4, 1, 1, [1]]]", stale="null"),
        "q": with_rates("[[4, [1]]]"),
    }
    assert profile_store.restore(bad | {"ann/bert/1000/1": with_rates("[[4, 2.5, 1, [2.5]]]")}) == list(bad)
    assert profile_store.at(KIND, "") == [Point(4, 2.5)]


def test_staleness_survives_a_restart_until_enough_is_measured() -> None:
    before, after = ProfileStore(), ProfileStore()
    for cores, rate in ((4, 10.0), (8, 15.0)):
        saw(before, cores, rate)
    assert [saw(before, 8, 7.5) for _ in range(3)] == [False, False, True]
    assert after.restore(before.dump()) == []
    assert after.stale(KIND, "") == "its last 3 windows ran at 0.50 of the measured rate"
    assert (after.stale(KIND, "T4"), after.stale(KIND, "", "validation")) == ("", "")
    assert after.at(KIND, "") == [Point(8, 7.5, windows=3)]
    after.mark_fresh(KIND, "")
    assert after.stale(KIND, "") == ""
    assert list(after.dump()) == ["ann/bert/1000/1"]


def test_phases_are_separate() -> None:
    profile_store = ProfileStore()
    for _ in range(5):
        saw(profile_store, 4, 10.0)
        assert not saw(profile_store, 4, 90.0, phase="validation")
    assert [(point.cores, point.rate) for point in profile_store.at(KIND, "")] == [(4, 10.0)]


def test_the_least_recently_used_class_is_dropped_with_its_record() -> None:
    profile_store = ProfileStore(kinds_max=2)
    kinds = [("ann", model, "", 1000, 1) for model in "abc"]
    for kind in (*kinds[:2], kinds[0], kinds[2]):
        saw(profile_store, 4, 1.0, kind=kind)
    assert [len(profile_store.at(kind, "")) for kind in kinds] == [1, 0, 1]
    assert profile_store.dump()["ann/b/1000/1"] == b""
