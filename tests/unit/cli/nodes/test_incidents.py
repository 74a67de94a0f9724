from __future__ import annotations

import pytest
from tests.support.etcd_server import free_ports
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin, node

from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import timestamp
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.contention_service_pb2 import Incident
from cotenant.v1.job_pb2 import Progress

START = 1_800_000_000.0


@pytest.fixture
def incidents(standin: Standin) -> Standin:
    over = Incident(
        id="1",
        node_id="gpu-1",
        victim_job_id="bert",
        suspect_job_id="sort",
        slowdown=0.4,
        recovered=0.98,
        start_time=timestamp(START),
        end_time=timestamp(START + 65),
        actions=["08:00:00Z held to 2 of its cores: on trial", "08:01:05Z freed: all is well"],
        outcome="it is free again after 65 s; bert is at 98% of its baseline, from 60%",
    )
    alone = Incident(id="2", node_id="gpu-1", suspect_job_id="pack", start_time=timestamp(START))
    alone.actions.append("08:00:00Z suspended: too loud \x1b[2J")
    standin.contention.incidents = [alone, over]
    standin.nodes.nodes = {"gpu-1": node("gpu-1")}
    return standin


def test_incidents_are_listed_across_pages(shell: Shell, incidents: Standin) -> None:
    ended = shell("incidents")
    assert ended.code == ExitCode.DONE
    head, first, second = ended.out.splitlines()
    assert head.split()[:5] == ["STARTED", "DURATION", "NODE", "VICTIM", "SUSPECT"]
    assert "pack" in first
    assert "suspended: too loud" in first
    assert "\x1b" not in first
    assert "gpu-1  bert    sort          40%        98%  it is free again after 65 s" in second


def test_an_incident_is_shown_with_all_actions(shell: Shell, incidents: Standin) -> None:
    out = shell("incidents", "--actions").out
    assert "gpu-1: bert was slowed by 40%, sort throttled\n  08:00:00Z held to 2 of its cores: on trial\n" in out
    assert out.startswith("2027-01-15T08:00:00.000Z gpu-1: pack throttled\n")
    assert "  still open\n" in out


def test_json_has_the_documented_keys(shell: Shell, incidents: Standin) -> None:
    alone, over = shell("incidents", "--json").json
    assert over == {
        "id": "1",
        "node": "gpu-1",
        "victim": "bert",
        "suspect": "sort",
        "open": False,
        "start_time": "2027-01-15T08:00:00.000Z",
        "end_time": "2027-01-15T08:01:05.000Z",
        "began_seconds_ago": over["began_seconds_ago"],
        "seconds": 65.0,
        "slowdown": 0.4,
        "recovered": 0.98,
        "actions": ["08:00:00Z held to 2 of its cores: on trial", "08:01:05Z freed: all is well"],
        "outcome": "it is free again after 65 s; bert is at 98% of its baseline, from 60%",
    }
    assert (alone["victim"], alone["open"], alone["recovered"], alone["outcome"]) == (None, True, None, None)


def test_the_server_filters_by_node_job_and_state(shell: Shell, incidents: Standin, spec: JobSpec) -> None:
    job = incidents.call(incidents.jobs.add, spec)
    shell("incidents", "--node", "gpu", "--job", job.id[:-1], "--open", "--limit", "1")
    (asked,) = incidents.contention.asked
    assert (asked.node_id, asked.job_id, asked.open_only, asked.page_size) == ("gpu-1", job.id, True, 1)
    assert shell("incidents", "--node", "cpu-9").code == ExitCode.USAGE


def test_an_empty_incident_list_is_noted_on_stderr(shell: Shell, standin: Standin) -> None:
    ended = shell("incidents")
    assert (ended.code, ended.out) == (ExitCode.DONE, "")
    assert "no incidents" in ended.err


def test_watch_prints_a_line_per_incident_change(
    shell: Shell, incidents: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def once_more(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            incidents.contention.incidents[0].recovered = 0.5
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("cotenant.cli.nodes.incidents.asyncio.sleep", once_more)
    lines = shell("incidents", "--watch").out.splitlines()
    assert [("bert" in line, "50%" in line) for line in lines] == [(True, False), (False, False), (False, True)]


def test_a_throttled_job_is_marked(shell: Shell, standin: Standin, spec: JobSpec) -> None:
    job = standin.call(standin.jobs.add, spec)
    standin.call(standin.jobs.run, job.id)
    held = Progress(throttle="suspended: bert is slowed")
    standin.call(standin.jobs.move, job.id, Phase.RUNNING, progress=held)
    assert "throttled on gpu-1" in shell("jobs").out
    card = shell("show", job.id).out
    assert "throttled" in card
    assert "suspended: bert is slowed" in card
    assert "step 0" not in card  # it tells none
    assert shell("show", job.id, "--json").json["progress"]["throttle"] == "suspended: bert is slowed"
    standin.call(standin.jobs.finish, job.id)
    assert "throttled" not in shell("show", job.id).out


def test_incidents_of_all_replicas_are_merged_and_unreachable_replicas_noted(shell: Shell, incidents: Standin) -> None:
    (port,) = free_ports(1)
    both = f"contention={incidents.address}|127.0.0.1:{port},placement={incidents.address}"
    ended = shell("--endpoint", both, "incidents", "--json")
    assert [one["id"] for one in ended.json] == ["2", "1"]
    assert "a replica of the contention service is unreachable" in ended.err
    other = Standin()
    other.start()
    try:
        other.contention.incidents = [Incident(id="3", node_id="gpu-2", start_time=timestamp(START + 10))]
        both = f"contention={incidents.address}|{other.address},placement={incidents.address}"
        ended = shell("--endpoint", both, "incidents", "--json")
        assert [one["id"] for one in ended.json] == ["3", "2", "1"]
        assert not ended.err
        assert [one["id"] for one in shell("--endpoint", both, "incidents", "--limit", "1", "--json").json] == ["3"]
    finally:
        other.stop()
