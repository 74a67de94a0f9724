"""deploy/ under a systemd that runs, as an operator uses it: `make test-vm`.

The tests stand in the order in which things are done, each on what those before it left.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.support.paths import DEPLOY
from tests.verification.machines.kernel import GROUPS, group_of, read
from tests.verification.machines.systemd.operator import (
    COUNT,
    ETC,
    NODE,
    PATIENCE,
    SCOPE,
    SERVICES,
    UNITS,
    cotenant,
    counted,
    counts_on,
    install,
    run,
    shown,
    told,
    troubles,
    until,
)

from cotenant.node_agent.supervisor.cgroups import parse_cpu_list

pytestmark = pytest.mark.root

ETCD = "ETCD_MAX_TXN_OPS=4096\nETCD_AUTO_COMPACTION_MODE=periodic\nETCD_AUTO_COMPACTION_RETENTION=10m\n"
STORE = 'store = "etcd://127.0.0.1:2379"\n'
PATIENT = f"[Service]\nTimeoutStartSec={300 * PATIENCE}\nTimeoutStopSec={15 * PATIENCE}\n"  # on an emulated processor


@pytest.fixture(scope="module")
def job() -> str:
    """One that counts for as long as these tests take."""
    return cotenant("submit", "--cpus", "2", "--", "sh", "-c", COUNT).split()[-1]


def process_of(job: str) -> int:
    """The process id that it printed."""
    return next(int(line) for line in cotenant("logs", job).splitlines() if line.isdigit())


def test_the_control_plane_is_installed_beside_an_etcd() -> None:
    Path("/var/log/journal").mkdir(exist_ok=True)
    run("journalctl", "--flush")
    with Path("/etc/default/etcd").open("a") as settings:
        settings.write(ETCD)
    run("systemctl", "restart", "etcd")
    for unit in ("cotenant@", "cotenant-agent"):
        place = Path(f"/etc/systemd/system/{unit}.service.d")
        place.mkdir()
        (place / "patience.conf").write_text(PATIENT)
    ETC.mkdir()
    packed = (DEPLOY / "systemd/etc/cotenant.toml").read_text()
    (ETC / "cotenant.toml").write_text(STORE + packed.replace('store = "sqlite"', "#"))
    said = install(*SERVICES)
    assert all(f"cotenant@{service}: active" in said for service in SERVICES)
    assert (ETC / "cotenant.toml").read_text().startswith(STORE)
    assert (ETC / "environment").stat().st_mode & 0o777 == 0o640


def test_an_agent_joins_by_a_second_run() -> None:
    assert "cotenant-agent: active" in install("agent")
    until(lambda: [node["state"] for node in told("nodes")] == ["ready"], "node that is ready")
    cotenant("health")
    (node,) = told("nodes")
    assert node["id"] == NODE
    assert not any(word in " ".join(node["not_enforced"]) for word in ("cpuset", "memory limits", "control group"))


def test_services_have_no_rights_and_their_state_is_theirs() -> None:
    for service in SERVICES:
        status = Path(f"/proc/{shown(f'cotenant@{service}', 'MainPID')}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert "Uid:\t0" not in status
    assert Path("/var/lib/cotenant").stat().st_mode & 0o777 == 0o700
    assert Path("/var/lib/cotenant-agent").stat().st_mode & 0o777 == 0o711


def test_a_job_runs_in_a_scope_that_systemd_delegated_on_cores_of_its_own(job: str) -> None:
    until(lambda: counted(job) > 2, "job that counts")
    pid = process_of(job)
    scope = shown(SCOPE, "ControlGroup")
    assert group_of(pid).is_relative_to(GROUPS / scope.removeprefix("/"))
    assert shown(SCOPE, "Delegate") == "yes"
    cpus = parse_cpu_list(read(group_of(pid) / "cpuset.cpus.effective"))
    assert len(cpus) == 2
    assert os.sched_getaffinity(pid) == set(cpus)
    assert shown("cotenant-agent", "ControlGroup") not in str(group_of(pid))


def test_the_job_runs_on_while_the_agents_unit_is_restarted(job: str) -> None:
    before = shown("cotenant-agent", "MainPID")
    run("systemctl", "restart", "cotenant-agent")
    assert shown("cotenant-agent", "MainPID") != before
    counts_on(job)


def test_the_jobs_cores_stay_its_own_after_a_daemon_reload(job: str) -> None:
    group = group_of(process_of(job))
    cpus = read(group / "cpuset.cpus")
    run("systemctl", "daemon-reload")
    run("systemctl", "daemon-reexec")
    counts_on(job)
    assert read(group / "cpuset.cpus") == cpus
    assert group == group_of(process_of(job))


@pytest.mark.parametrize("unit", UNITS)
def test_killed_services_are_restarted(unit: str, job: str) -> None:
    before = int(shown(unit, "NRestarts"))
    os.kill(int(shown(unit, "MainPID")), signal.SIGKILL)
    until(lambda: int(shown(unit, "NRestarts")) > before and shown(unit, "ActiveState") == "active", "restart")
    until(lambda: cotenant("health"), "health of all")
    counts_on(job)


def test_an_upgrade_ends_no_job(job: str) -> None:
    install(*SERVICES, "agent")
    until(lambda: [node["state"] for node in told("nodes")] == ["ready"], "node that is ready")
    counts_on(job)


def test_all_services_are_stopped_and_the_job_runs_on(job: str) -> None:
    pid = process_of(job)
    run("systemctl", "stop", *UNITS)
    assert {unit: (shown(unit, "Result"), shown(unit, "ExecMainStatus")) for unit in UNITS} == dict.fromkeys(
        UNITS, ("success", "0")
    )
    assert Path(f"/proc/{pid}").exists()
    run("systemctl", "start", *UNITS)
    until(lambda: cotenant("health"), "health of all")
    counts_on(job)


def test_a_job_that_is_cancelled_leaves_nothing_in_the_scope(job: str) -> None:
    group = group_of(process_of(job))
    until(lambda: cotenant("cancel", job), "queue that takes the wish")
    until(lambda: told("show", job)["phase"] == "cancelled", "end of the job")
    until(lambda: not group.exists(), "removal of its group")


def test_the_journal_has_no_errors() -> None:
    assert troubles("-b") == []


def test_a_unit_with_invalid_settings_fails_with_a_reason() -> None:
    settings = ETC / "predictor.environment"
    settings.write_text("COTENANT_FLAGS=--listen nonsense\n")
    with pytest.raises(AssertionError, match="Job for cotenant@predictor"):
        run("systemctl", "restart", "cotenant@predictor")
    assert "nonsense" in run("journalctl", "-b", "-u", "cotenant@predictor")
    settings.unlink()
    run("systemctl", "restart", "cotenant@predictor")


def test_one_more_job_runs_when_the_machine_is_switched_off() -> None:
    job = cotenant("submit", "--cpus", "1", "--", "sh", "-c", COUNT).split()[-1]
    until(lambda: counted(job), "job that counts")
