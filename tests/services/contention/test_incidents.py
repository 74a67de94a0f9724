from __future__ import annotations

from cotenant.core.policy import AttemptWindow, Directive, NodeWindow
from cotenant.services.contention.incidents import ACTIONS_MAX, Incidents
from cotenant.v1 import contention_service_pb2 as pb


def window(now: float, *jobs: str, node: str = "n1") -> NodeWindow:
    return NodeWindow(node, now, 5.0, tuple(AttemptWindow(job, 1, cpu_job=True, cores_used=1.0) for job in jobs))


def held(share: float, job: str = "a", reason: str = "too loud") -> Directive:
    return Directive(job, 1, share, reason)


def listed(incidents: Incidents) -> list[pb.Incident]:
    return list(incidents.page("", 0, "").incidents)


def test_an_incident_lasts_from_the_first_throttling_until_the_attempt_is_free() -> None:
    incidents = Incidents()
    incidents.note(window(100, "a"), [held(0.5)])
    incidents.note(window(105, "a"), [held(0.5)])
    incidents.note(window(110, "a"), [held(0.0, reason="still too loud")])
    (open_one,) = listed(incidents)
    assert not open_one.HasField("end_time")
    incidents.note(window(115, "a"), [held(1.0, reason="quiet now")])
    (incident,) = listed(incidents)
    assert (incident.node_id, incident.suspect_job_id) == ("n1", "a")
    assert (incident.start_time.seconds, incident.end_time.seconds) == (100, 115)
    assert list(incident.actions) == [
        "held to 50% of its speed: too loud",
        "suspended: still too loud",
        "freed: quiet now",
    ]


def test_an_attempt_that_leaves_the_node_ends_its_incident_there_and_no_other() -> None:
    incidents = Incidents()
    incidents.note(window(100, "a", "b"), [held(0.5, "a"), held(0.5, "b")])
    incidents.note(window(100, "a", node="n2"), [held(0.5, "a")])
    incidents.note(window(105, "b"), [])
    assert {(one.node_id, one.suspect_job_id) for one in listed(incidents) if one.HasField("end_time")} == {("n1", "a")}


def test_throttling_an_attempt_again_later_is_another_incident() -> None:
    incidents = Incidents()
    for now, share in ((100, 0.5), (105, 1.0), (110, 0.5)):
        incidents.note(window(now, "a"), [held(share)])
    assert [one.start_time.seconds for one in listed(incidents)] == [110, 100]


def test_freeing_what_was_free_is_no_incident() -> None:
    incidents = Incidents()
    incidents.note(window(100, "a"), [held(1.0)])
    assert listed(incidents) == []


def test_the_oldest_incidents_make_room_even_open_ones() -> None:
    incidents = Incidents(incidents_max=2)
    for now, job in ((100, "a"), (105, "b"), (110, "c")):
        incidents.note(window(now, "a", "b", "c"), [held(0.5, job)])
    assert [one.suspect_job_id for one in listed(incidents)] == ["c", "b"]
    incidents.note(window(115, "a", "b", "c"), [held(1.0, "a")])


def test_only_the_last_actions_of_a_long_incident_are_kept() -> None:
    incidents = Incidents()
    for tick in range(ACTIONS_MAX + 5):
        incidents.note(window(100 + tick, "a"), [held(0.5, reason=f"{tick}")])
    (incident,) = listed(incidents)
    assert len(incident.actions) == ACTIONS_MAX
    assert incident.actions[-1].endswith(f"{ACTIONS_MAX + 4}")
