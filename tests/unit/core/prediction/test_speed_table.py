from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency
from cotenant.core.prediction.speed_table import SpeedTable

PLACES = st.dictionaries(st.tuples(st.integers(1, 8), st.integers(0, 32)), st.none() | st.floats(0.1, 100), max_size=8)


def paces(rates: dict[tuple[int, int], float | None]) -> SpeedTable:
    judged = [
        CandidateEstimate(rate, None, 0.5, allocation=Candidate(cores, nodes=nodes))
        for (nodes, cores), rate in rates.items()
    ]
    return SpeedTable.of(Estimate(candidates=tuple(judged)))


@given(PLACES, st.integers(1, 8), st.integers(1, 32))
def test_only_what_was_judged_is_known(rates: dict[tuple[int, int], float | None], nodes: int, cores: int) -> None:
    assert paces(rates).rate(nodes, cores) == rates.get((nodes, cores))


@given(PLACES, st.integers(1, 8), st.integers(1, 32), st.sampled_from((1.0, 2.0, 4.0)))
def test_the_nearest_is_near_and_exact_where_that_is_known(
    rates: dict[tuple[int, int], float | None], nodes: int, cores: int, within: float
) -> None:
    near = {
        place
        for place, rate in rates.items()
        if rate is not None
        and max(place[0], nodes) <= within * min(place[0], nodes)
        and max(place[1], cores) <= within * min(place[1], cores)
    }
    found = paces(rates).nearest(nodes, cores, within=within)
    assert (found is not None) == bool(near)
    if found:
        allocation, judged = found
        place = allocation.nodes, allocation.cores
        assert place in near
        assert judged.rate_per_second == rates[place]
        assert place == (nodes, cores) or (nodes, cores) not in near
        assert allocation.nodes == nodes or all(other != nodes for other, _ in near)


def test_gpu_types_are_distinguished_only_if_requested() -> None:
    fast, slow = Candidate(4, gpu_type="h100"), Candidate(4, gpu_type="k80")
    told = SpeedTable.of(
        Estimate(candidates=(CandidateEstimate(9.0, allocation=fast), CandidateEstimate(1.0, allocation=slow)))
    )
    assert (told.rate(1, 4, "k80"), told.rate(1, 4, "v100")) == (1.0, None)


def test_a_service_is_looked_up_by_its_replicas() -> None:
    sure, unsure = Latency(2, p99_seconds=0.1, confidence=0.9), Latency(2, p99_seconds=9.0, confidence=0.1)
    judged = [CandidateEstimate(latency=one, allocation=Candidate(4)) for one in (unsure, sure, Latency(4))]
    told = SpeedTable.of(Estimate(candidates=tuple(judged)))
    assert told.latency(2) == sure
    assert told.latency(3) is None
    assert list(told.latencies) == [2, 4]
