"""The history of rates by cores."""

from __future__ import annotations

import pytest

from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.sizing import rate_history
from cotenant.core.sizing.rate_history import RateHistories, RateHistory, job_class_of


def spec(model: str, gpu_milli: int = 1000, tenant: str = "ann") -> JobSpec:
    return JobSpec(tenant=tenant, roles=(Role("worker", 1, Request(gpu_milli)),), model=model)


def seen(tracks: RateHistories, job: JobSpec, rates: dict[int, float]) -> None:
    for cores, rate in rates.items():
        tracks.add(job_class_of(job), cores, rate)


def test_what_is_enough_is_known_once_more_gained_nothing() -> None:
    tracks, job = RateHistories(), spec("bert")
    seen(tracks, job, {4: 10.0})
    assert tracks.enough(job_class_of(job)) is None, "one count tells nothing"
    seen(tracks, job, {2: 5.0})
    seen(tracks, job, {3: 7.5})
    assert tracks.enough(job_class_of(job)) is None, "it may still rise"
    seen(tracks, job, {5: 10.0})
    assert tracks.enough(job_class_of(job)) == 4


def test_an_estimate_without_cores_gets_those_of_its_class_or_category() -> None:
    tracks = RateHistories()
    for model, enough in (("resnet18", 9), ("alexnet", 6), ("vgg16", 4)):
        seen(tracks, spec(model), {cores: min(cores, enough) * 1.0 for cores in range(1, 13)})
    assert tracks.informed(spec("alexnet"), UNKNOWN).cores_useful == 6
    other = tracks.informed(spec("mobilenet"), UNKNOWN)
    assert (other.cores_useful, other.cores_useful_confidence) == (6, 0.5)
    assert tracks.informed(spec("mobilenet", gpu_milli=2000), UNKNOWN) == UNKNOWN
    assert tracks.informed(spec("bert"), UNKNOWN) == UNKNOWN
    told = Estimate(cores_useful=3, cores_useful_confidence=0.8)
    assert tracks.informed(spec("alexnet"), told) == told


def test_it_survives_a_restart_and_names_what_cannot_be_read() -> None:
    tracks, job = RateHistories(), spec("a/b %")
    seen(tracks, job, {1: 9.9, 2: 10.0, 3: 10.0})
    again = RateHistories()
    assert again.restore({**tracks.dump(), "bad": b"{"}) == ["bad"]
    assert again.points(job_class_of(job)) == tracks.points(job_class_of(job))
    assert again.enough(job_class_of(job)) == tracks.enough(job_class_of(job)) == 1
    assert tracks.dump() == {}


def test_the_kind_unused_for_longest_is_forgotten() -> None:
    tracks = RateHistories(kinds_max=2)
    for model in ("a", "b", "c"):
        seen(tracks, spec(model), {1: 1.0})
    assert [bool(tracks.points(job_class_of(spec(model)))) for model in ("a", "b", "c")] == [False, True, True]


def test_a_drop_counts_once_it_has_lasted_and_undisturbed() -> None:
    track = RateHistory()
    assert track.add(3, 10.0, 60.0)
    assert not track.add(3, 5.0, 600.0, contended=True)
    assert not any(track.add(3, 8.0, 60.0) for _ in range(4))
    assert not track.drifted
    assert track.add(3, 8.0, 60.0)
    assert track.drifted
    assert [(point.cores, point.rate) for point in track.points()] == [(3, 8.0)]


def test_a_drop_that_ends_soon_changes_nothing() -> None:
    track = RateHistory()
    for rate in (10.0, 8.0, 8.0, 10.0, 8.0, 8.0, 10.0, 8.0, 8.0):
        track.add(3, rate, 120.0)
    assert not track.drifted


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_window_without_progress_is_ignored(rate: float) -> None:
    assert not RateHistory().add(3, rate, 60.0)


def test_at_most_so_many_classes_are_known_to_level_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_history, "KINDS_MAX", 2)
    tracks = RateHistories()
    for model in ("a", "b", "c"):
        seen(tracks, spec(model), {1: 9.9, 2: 10.0, 3: 10.0})
    assert [tracks.enough(job_class_of(spec(model))) for model in ("a", "b", "c")] == [None, 1, 1]


def test_the_version_changes_with_what_is_enough_and_with_nothing_else() -> None:
    tracks, job, known = RateHistories(), spec("bert"), list[tuple[int, int | None]]()
    for cores, rate in ((4, 10.0), (2, 5.0), (3, 7.5), (5, 10.0), (5, 10.0), (3, 7.5)):
        seen(tracks, job, {cores: rate})
        known.append((tracks.version, tracks.enough(job_class_of(job))))
    assert [version for version, _ in known] == [0, 0, 0, 1, 1, 1]
    assert [enough for _, enough in known] == [None, None, None, 4, 4, 4]
