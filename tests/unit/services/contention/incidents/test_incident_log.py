from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cotenant.core.policy.protocols import AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.services.contention.incidents.incident_log import ACTIONS_MAX, SILENT_SECONDS_MAX, IncidentLog
from cotenant.v1 import contention_service_pb2 as pb


def window(now: float, *jobs: str, node: str = "n1") -> NodeWindow:
    return NodeWindow(node, now, 5.0, tuple(AttemptWindow(job, 1, cpu_job=True, cores_used=1.0) for job in jobs))


def held(share: float, job: str = "a", reason: str = "too loud") -> Directive:
    return Directive(job, 1, share, reason)


def listed(incidents: IncidentLog) -> list[pb.Incident]:
    return list(asyncio.run(incidents.page("", 0, "")).incidents)


def test_an_incident_lasts_from_the_first_throttling_until_the_attempt_is_unthrottled() -> None:
    incidents = IncidentLog()
    incidents.record(window(100, "a"), [held(0.5)])
    incidents.record(window(105, "a"), [held(0.5)])
    incidents.record(window(110, "a"), [held(0.0, reason="still too loud")])
    (open_one,) = listed(incidents)
    assert not open_one.HasField("end_time")
    incidents.record(window(115, "a"), [held(1.0, reason="quiet now")])
    (incident,) = listed(incidents)
    assert (incident.node_id, incident.suspect_job_id) == ("n1", "a")
    assert (incident.start_time.seconds, incident.end_time.seconds) == (100, 115)
    assert list(incident.actions) == [
        "00:01:40Z held to 50% of its speed: too loud",
        "00:01:50Z suspended: still too loud",
        "00:01:55Z freed: quiet now",
    ]
    assert incident.outcome == "it is free again after 15 s"


def test_an_attempt_that_leaves_the_node_ends_its_incident_there_and_no_other() -> None:
    incidents = IncidentLog()
    incidents.record(window(100, "a", "b"), [held(0.5, "a"), held(0.5, "b")])
    incidents.record(window(100, "a", node="n2"), [held(0.5, "a")])
    incidents.record(window(105, "b"), [])
    assert {(one.node_id, one.suspect_job_id) for one in listed(incidents) if one.HasField("end_time")} == {("n1", "a")}


def test_throttling_an_attempt_again_later_is_another_incident() -> None:
    incidents = IncidentLog()
    for now, share in ((100, 0.5), (105, 1.0), (110, 0.5)):
        incidents.record(window(now, "a"), [held(share)])
    assert [one.start_time.seconds for one in listed(incidents)] == [110, 100]


def test_unthrottling_a_free_attempt_opens_no_incident() -> None:
    incidents = IncidentLog()
    incidents.record(window(100, "a"), [held(1.0)])
    assert listed(incidents) == []


def test_the_oldest_incidents_are_dropped_even_if_open() -> None:
    incidents = IncidentLog(incidents_max=2)
    for now, job in ((100, "a"), (105, "b"), (110, "c")):
        incidents.record(window(now, "a", "b", "c"), [held(0.5, job)])
    assert [one.suspect_job_id for one in listed(incidents)] == ["c", "b"]
    incidents.record(window(115, "a", "b", "c"), [held(1.0, "a")])


def test_only_the_last_actions_of_a_long_incident_are_kept() -> None:
    incidents = IncidentLog()
    for tick in range(ACTIONS_MAX + 5):
        incidents.record(window(100 + tick, "a"), [held(0.5, reason=f"{tick}")])
    (incident,) = listed(incidents)
    assert len(incident.actions) == ACTIONS_MAX
    assert incident.actions[-1].endswith(f"{ACTIONS_MAX + 4}")


def hurt(now: float, rate: float | None, job: str = "a", **fields: Any) -> NodeWindow:
    victim = AttemptWindow("gpu", 1, cpu_job=False, cores_used=1.0, rate_per_second=rate, **fields)
    return NodeWindow("n1", now, 5.0, (AttemptWindow(job, 1, cpu_job=True, cores_used=1.0), victim))


def for_gpu(throttle: Throttle, slowdown: float = 0.4, reason: str = "on trial") -> Directive:
    return Directive("a", 1, 0.5, reason, throttle, victim_job_id="gpu", victim_slowdown=slowdown)


def test_an_incident_records_the_victims_slowdown_and_recovery() -> None:
    incidents = IncidentLog()
    incidents.record(hurt(100, 6.0), [for_gpu(Throttle(cores=2))])
    incidents.record(hurt(105, 8.0), [for_gpu(Throttle(cores=1, suspended=True), 0.2, "still too slow")])
    (incident,) = listed(incidents)
    assert (incident.victim_job_id, incident.slowdown, incident.recovered) == ("gpu", 0.4, 0.8)
    for now, rate in ((110, 9.0), (115, None), (120, 10.0), (125, 10.0), (130, 10.0)):
        incidents.record(hurt(now, rate), [])
    incidents.record(hurt(135, 10.0), [Directive("a", 1, 1.0, "all is well", Throttle())])
    (incident,) = listed(incidents)
    assert list(incident.actions) == [
        "00:01:40Z held to 2 of its cores: on trial (gpu at 60% of its baseline)",
        "00:01:45Z suspended: still too slow (gpu at 80% of its baseline)",
        "00:02:15Z freed: all is well (gpu at 100% of its baseline)",
    ]
    assert incident.recovered == pytest.approx(1.0)
    assert incident.outcome == "it is free again after 35 s; gpu is at 100% of its baseline, from 60%"


def test_an_unsteady_rate_is_ignored() -> None:
    incidents = IncidentLog()
    incidents.record(hurt(100, 6.0), [for_gpu(Throttle(cores=2))])
    incidents.record(hurt(105, 1.0, steady=False), [])
    assert listed(incidents)[0].recovered == 0


def test_incidents_are_filtered_by_job_and_by_state() -> None:
    incidents = IncidentLog()
    incidents.record(hurt(100, 6.0), [for_gpu(Throttle(cores=2))])
    incidents.record(window(100, "b", node="n2"), [held(0.5, "b")])
    incidents.record(window(105, "b", node="n2"), [held(1.0, "b")])

    def found(**wanted: Any) -> list[str]:
        return [one.suspect_job_id for one in asyncio.run(incidents.page("", 0, "", **wanted)).incidents]

    assert (found(), found(job_id="gpu"), found(job_id="b"), found(job_id="c")) == (["b", "a"], ["a"], ["b"], [])
    assert (found(open_only=True), found(open_only=True, job_id="b")) == (["a"], [])


def test_the_incidents_of_a_silent_node_are_closed() -> None:
    incidents = IncidentLog()
    incidents.record(hurt(100, 6.0), [for_gpu(Throttle(cores=2))])
    incidents.forget_silent(100 + SILENT_SECONDS_MAX)
    assert not listed(incidents)[0].HasField("end_time")
    incidents.forget_silent(101 + SILENT_SECONDS_MAX)
    (incident,) = listed(incidents)
    assert (incident.end_time.seconds, incident.outcome) == (100, "the node fell silent after 0 s")
