"""Jobs over the agent's stream, as real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import alive, need_groups, until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, NODE, PYTHON, assignment, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.v1 import job_pb2

SHOW = "import os, json; print(json.dumps([dict(os.environ), sorted(os.sched_getaffinity(0))]))"

NOT_LAUNCHED = job_pb2.ATTEMPT_STATE_NOT_LAUNCHED


def ack(job_id: str, number: int = 1) -> agent_pb2.AttemptAck:
    return agent_pb2.AttemptAck(job_id=job_id, number=number)


def attempt_path(agent: RunningAgent, job_id: str, number: int = 1) -> Path:
    return agent.config.state_dir / "attempts" / f"{job_id}-{number}"


def output(agent: RunningAgent, job_id: str, rank: int = 0) -> str:
    return (attempt_path(agent, job_id) / f"output-{rank}.log").read_text()


async def test_an_attempt_runs_and_succeeds(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("hello", "echo hi"))
    end = await placement.ended("hello")
    assert placement.states("hello") == ["RUNNING", "SUCCEEDED"]
    assert (end.epoch, end.exit.code, end.exit.signal, end.exit.node_id) == (10, 0, 0, NODE)
    assert output(agent, "hello") == "hi\n"


async def test_a_failure_reports_the_status_and_the_rank(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("bad", "[ $RANK = 0 ] && exec sleep 60; exit 3", tasks=[task(0), task(1)]))
    end = await placement.ended("bad")
    assert end.state == job_pb2.ATTEMPT_STATE_FAILED
    assert (end.exit.code, end.exit.rank, end.message) == (3, 1, "rank 1 ended with status 3")


async def test_a_failure_by_a_signal_names_it(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("crash", "kill -SEGV $$"))
    end = await placement.ended("crash")
    assert (end.exit.signal, end.exit.code) == (11, 0)
    assert "signal 11" in end.message


@pytest.mark.root
async def test_a_job_sees_its_cores_gpus_and_rank(placement: Placement, agent: RunningAgent) -> None:
    need_groups("cpuset")
    gpus = [gpu.uuid for gpu in placement.hellos[-1].inventory.gpus]
    job = assignment("show", [*PYTHON, SHOW], tasks=[task(cpus=CPUS[-1:], gpus=gpus)])
    placement.assign(job)
    await placement.ended("show")
    environment, affinity = json.loads(output(agent, "show"))
    assert affinity == CPUS[-1:]
    assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)
    assert environment["COTENANT_JOB_ID"] == "show"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "COTENANT_TOKEN" not in environment


@pytest.mark.root
async def test_a_task_cannot_leave_its_cpuset(placement: Placement, agent: RunningAgent) -> None:
    need_groups("cpuset")
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    escape = "import os\ntry: os.sched_setaffinity(0, {%d})\nexcept OSError: pass\nprint(os.sched_getaffinity(0))"
    placement.assign(assignment("escape", [*PYTHON, escape % CPUS[0]], tasks=[task(cpus=CPUS[-1:])]))
    await placement.ended("escape")
    assert output(agent, "escape") == f"{{{CPUS[-1]}}}\n"


@pytest.mark.root
async def test_a_running_attempt_moves_to_other_cores(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    need_groups("cpuset")
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    wait = (
        f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\nprint(os.sched_getaffinity(0))"
    )
    first = assignment("mover", [*PYTHON, wait], tasks=[task(cpus=CPUS[:1])])
    placement.assign(first)
    await placement.running("mover")
    second = assignment("mover", [*PYTHON, wait], tasks=[task(cpus=CPUS[1:2])], epoch=11)
    placement.assign(second)
    await placement.until(lambda: any(report.epoch == 11 for report in placement.reports))
    (tmp_path / "go").touch()
    end = await placement.ended("mover")
    assert (end.epoch, output(agent, "mover")) == (11, f"{{{CPUS[1]}}}\n")


async def test_the_warning_signal_comes_first_and_the_job_may_finish(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    script = f"trap 'echo saved; exit 0' USR1; echo $$ > {tmp_path}/pid; while :; do sleep 0.01; done"
    placement.assign(shell("saver", script, spec=job_pb2.JobSpec(warning_signal="SIGUSR1")))
    await until(lambda: written_number(tmp_path / "pid"))
    await placement.running("saver")
    placement.send(stops=[stop_order("saver", grace_seconds=20)])
    end = await placement.ended("saver")
    assert placement.states("saver") == ["RUNNING", "STOPPING", "STOPPED"]
    assert (end.exit.code, end.exit.signal) == (0, 0)
    assert "saved" in output(agent, "saver")


async def test_a_job_that_ignores_the_warning_is_killed_when_grace_is_over(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    placement.assign(shell("deaf", f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"))
    pid = await until(lambda: written_number(tmp_path / "pid"))
    placement.send(stops=[stop_order("deaf", grace_seconds=0.2)])
    end = await placement.ended("deaf")
    assert (end.state, end.exit.signal) == (job_pb2.ATTEMPT_STATE_STOPPED, 9)
    assert not alive(pid)


async def test_a_second_order_shortens_the_grace(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    placement.assign(shell("slow", f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"))
    await until(lambda: written_number(tmp_path / "pid"))
    placement.send(stops=[stop_order("slow", grace_seconds=3600)])
    await placement.until(lambda: "STOPPING" in placement.states("slow"))
    placement.send(stops=[stop_order("slow", grace_seconds=0)])
    assert (await placement.ended("slow")).state == job_pb2.ATTEMPT_STATE_STOPPED


async def test_a_stop_order_right_after_the_assignment_stops_it(placement: Placement, agent: RunningAgent) -> None:
    placement.send(assignments=[shell("brief", "sleep 60")], stops=[stop_order("brief", grace_seconds=1)])
    placement.assign(shell("other", "sleep 60"))
    placement.send(stops=[stop_order("other", grace_seconds=1)])
    for job_id in ("brief", "other"):
        assert (await placement.ended(job_id)).state == job_pb2.ATTEMPT_STATE_STOPPED


async def test_a_repeated_assignment_runs_once(placement: Placement, agent: RunningAgent) -> None:
    job = shell("twice", "echo ran; sleep 0.2")
    placement.send(assignments=[job, job])
    await placement.running("twice")
    placement.assign(job)
    await placement.ended("twice")
    assert output(agent, "twice") == "ran\n"


@pytest.mark.parametrize(
    ("job_id", "command", "words"),
    [
        ("nothing", ["no-such-command"], "command not found: no-such-command"),
        ("folder", ["/tmp"], "permission denied: /tmp is not executable"),
        ("nul", ["/bin/echo", "a\0b"], "NUL"),
        ("empty", [], "no command"),
        ("../../escape", ["true"], "job id"),
    ],
)
async def test_invalid_commands_fail_with_a_plain_reason(
    placement: Placement, agent: RunningAgent, job_id: str, command: list[str], words: str
) -> None:
    placement.assign(assignment(job_id, command))
    end = await placement.ended(job_id)
    assert end.state == job_pb2.ATTEMPT_STATE_FAILED
    assert words in end.message
    assert "RUNNING" not in placement.states(job_id)


async def test_a_missing_interpreter_is_named(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    placement.assign(assignment("orphan", [str(script)]))
    assert f"the interpreter of {script} is missing" in (await placement.ended("orphan")).message


async def test_a_missing_working_directory_is_named(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("lost", "true", spec=job_pb2.JobSpec(working_directory="/no/such/place")))
    end = await placement.ended("lost")
    assert end.message == "the working directory /no/such/place does not exist"
    assert (end.state, end.launch_cause) == (NOT_LAUNCHED, job_pb2.LAUNCH_CAUSE_WORKING_DIRECTORY)


async def test_cores_and_gpus_of_a_live_attempt_are_not_allocated_again(
    placement: Placement, agent: RunningAgent
) -> None:
    gpu = placement.hellos[-1].inventory.gpus[0].uuid
    placement.assign(shell("owner", "sleep 60", tasks=[task(cpus=CPUS[:1], gpus=[gpu])]))
    await placement.running("owner")
    placement.assign(
        shell("core-thief", "true", tasks=[task(cpus=CPUS[:1])]), shell("gpu-thief", "true", tasks=[task(gpus=[gpu])])
    )
    thief = await placement.ended("core-thief")
    assert thief.message == f"CPU {CPUS[0]} is held by attempt owner/1"
    assert (thief.state, thief.launch_cause) == (NOT_LAUNCHED, job_pb2.LAUNCH_CAUSE_ORDER)
    assert (await placement.ended("gpu-thief")).message == f"GPU {gpu} is held by attempt owner/1"
    placement.send(stops=[stop_order("owner", grace_seconds=1)])
    await placement.ended("owner")
    placement.assign(shell("heir", "true", tasks=[task(cpus=CPUS[:1], gpus=[gpu])]))
    assert (await placement.ended("heir")).state == job_pb2.ATTEMPT_STATE_SUCCEEDED


async def test_an_end_is_repeated_in_every_hello_until_it_is_acknowledged(
    placement: Placement, agent: RunningAgent
) -> None:
    placement.assign(shell("done", "exit 4"), assignment("refused", ["no-such-command"]))
    await placement.ended("done")
    await placement.ended("refused")
    await agent.stop()
    await agent.start()
    hello = await placement.connected(2)
    assert {(report.job_id, report.exit.code) for report in hello.attempts} == {("done", 4), ("refused", 127)}
    placement.send(acks=[ack("done"), ack("refused")])
    await until(lambda: not list((agent.config.state_dir / "attempts").iterdir()))
    await agent.stop()
    await agent.start()
    assert not (await placement.connected(3)).attempts


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_end_names_the_reason_of_the_first_stop_order(
    placement: Placement, agent: RunningAgent, *, restarted: bool
) -> None:
    """Also if the agent is restarted in between: a placement that ordered the stop may not have recorded it."""
    placement.assign(shell("stopped", "trap 'touch warned' TERM; touch ready; while [ ! -e go ]; do sleep 0.01; done"))
    await placement.running("stopped")
    work = attempt_path(agent, "stopped") / "work"
    await until((work / "ready").exists)  # before its trap, the warning would end it
    contention = stop_order("stopped", grace_seconds=60, reason=job_pb2.STOP_REASON_CONTENTION)
    placement.send(stops=[contention])
    await until((work / "warned").exists)
    placement.send(stops=[stop_order("stopped", grace_seconds=50, reason=job_pb2.STOP_REASON_DRAINED)])
    if restarted:
        await agent.stop()
        await agent.start()
        await placement.connected(2)  # an end before it would be part of the hello
    (work / "go").touch()
    end = await placement.ended("stopped")
    assert (end.state, end.stop_reason) == (job_pb2.ATTEMPT_STATE_STOPPED, job_pb2.STOP_REASON_CONTENTION)


async def test_only_the_output_of_the_last_acknowledged_attempts_is_kept(
    placement: Placement, agent: RunningAgent
) -> None:
    await agent.stop()
    await agent.start(kept_max=2)
    await placement.connected(2)
    kept = agent.config.state_dir / "kept"
    for job_id in ("a", "b", "c"):
        placement.assign(shell(job_id, f"echo {job_id}"))
        await placement.ended(job_id)
        placement.send(acks=[ack(job_id)])
        await until((kept / f"{job_id}-1").exists)
    await until(lambda: not (kept / "a-1").exists())
    assert sorted(path.name for path in kept.iterdir()) == ["b-1", "c-1"]
    assert [path.name for path in (kept / "c-1").iterdir()] == ["output-0.log"]


async def test_an_acknowledged_attempt_is_not_run_again(placement: Placement, agent: RunningAgent) -> None:
    job = shell("once", "echo ran")
    placement.assign(job)
    await placement.ended("once")
    placement.send(acks=[ack("once")])
    await until((agent.config.state_dir / "kept" / "once-1").exists)
    placement.reports.clear()
    placement.assign(job)
    assert "already ran on this node" in (await placement.ended("once")).message


async def test_a_stop_of_an_unknown_attempt_is_reported(placement: Placement, agent: RunningAgent) -> None:
    placement.send(stops=[stop_order("stranger", grace_seconds=1)])
    end = await placement.ended("stranger")
    assert (end.state, end.message) == (job_pb2.ATTEMPT_STATE_STOPPED, "unknown on this node")


async def test_a_job_may_use_a_directory_of_its_own(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("writer", "echo kept > result; pwd"))
    await placement.ended("writer")
    assert output(agent, "writer").strip() == str(attempt_path(agent, "writer") / "work")
    placement.send(acks=[ack("writer")])
    await until((agent.config.state_dir / "kept" / "writer-1" / "work" / "result").exists)
