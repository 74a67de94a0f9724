from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.cli.conftest import COTENANT, Shell
from tests.unit.cli.standin import TOKEN, Standin

from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import spec_from_wire
from cotenant.core.model.job import OpenReplicas, Qos
from cotenant.rpc.access import publish
from cotenant.rpc.endpoints import Endpoints
from cotenant.v1.job_pb2 import JOB_PHASE_QUEUED

HELLO = (sys.executable, "-c", "print('hello'); print('world')")


def test_the_tenant_is_sent_only_if_it_is_given(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    """The queue fills in the caller's tenant."""
    (tmp_path / "job.yaml").write_text("{tenant: b, cpus: 1, command: [x]}\n")
    for words in (
        ("--cpus", "1", "--", "x"),
        ("--cpus", "1", "--tenant", "a", "--", "x"),
        (str(tmp_path / "job.yaml"),),
    ):
        assert shell("submit", *words).code == ExitCode.DONE
    assert [request.spec.tenant for request in standin.jobs.asked] == ["", "a", "b"]


def test_a_job_from_options_is_submitted_and_its_id_printed(shell: Shell, standin: Standin) -> None:
    ended = shell(
        *("submit", "--name", "resnet", "--gpus", "0.5", "--cpus", "auto", "--memory", "4GiB", "--replicas", "2"),
        *("--role", "trainer", "--tenant", "vision", "--queue", "night", "--priority", "7", "--expected", "2h"),
        *("--retries", "3", "--grace", "1m", "--signal", "usr1", "--locality", "rack", "--model", "resnet50"),
        *("--steps", "90000", "--progress-regex", r"step (\d+)", "--env", "A=b=c", "--label", "k=v"),
        *("--workdir", "/srv", "--not-preemptible", "--", "python3", "train.py", "--token", "--", "x"),
    )
    [(job_id, job)] = standin.jobs.jobs.items()
    assert (ended.code, ended.out, ended.err) == (ExitCode.DONE, f"{job_id}\n", "")
    spec = spec_from_wire(job.spec)
    [role] = spec.roles
    assert (role.name, role.replicas) == ("trainer", 2)
    assert (role.request.gpu_milli, role.request.cores, role.request.memory_bytes) == (500, None, 4 * 2**30)
    assert (spec.name, spec.tenant, spec.queue, spec.priority) == ("resnet", "vision", "night", 7)
    assert (spec.expected_seconds, spec.grace_seconds, spec.warning_signal) == (7200, 60, "SIGUSR1")
    assert (spec.locality, spec.model, spec.steps_total, spec.retries_max) == ("rack", "resnet50", 90000, 3)
    assert (spec.progress_regex, spec.environment, spec.labels) == (r"step (\d+)", (("A", "b=c"),), (("k", "v"),))
    assert (spec.working_directory, spec.preemptible) == ("/srv", False)
    assert spec.command == ("python3", "train.py", "--token", "--", "x")


def test_options_set_replicas_and_objectives_of_a_service(shell: Shell, standin: Standin) -> None:
    ended = shell(
        *("submit", "--kind", "inference", "--gpus", "1", "--replicas", "auto", "--replicas-min", "2"),
        *("--replicas-max", "12", "--latency", "50ms", "--percentile", "99", "--arrivals", "400", "--", "serve"),
    )
    assert (ended.code, ended.err) == (ExitCode.DONE, "")
    [job] = standin.jobs.jobs.values()
    spec = spec_from_wire(job.spec)
    assert (spec.open, spec.replicas) == (OpenReplicas(2, 12), 2)
    assert spec.qos == Qos(0.0, 0.05, 99.0, 400.0)


def test_a_variable_without_a_value_is_copied_from_the_environment(
    shell: Shell, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "/data")
    assert shell("submit", "--env", "DATA", "--", "true").code == ExitCode.DONE
    assert shell("submit", "--env", "NOT_SET_HERE", "--", "true").code == ExitCode.USAGE
    [job] = standin.jobs.jobs.values()
    assert dict(job.spec.environment) == {"DATA": "/data"}


def test_all_invalid_options_are_reported_without_calling_the_mesh(shell: Shell, standin: Standin) -> None:
    ended = shell("submit", "--gpus", "lots", "--cpus", "1.5", "--memory", "4", "--kind", "gpu", "--", "true")
    assert ended.code == ExitCode.USAGE
    for option in ("--gpus", "--cpus", "--memory", "--kind"):
        assert f"\n  {option}: " in ended.err
    assert not standin.jobs.asked


def test_nothing_to_run_is_bad_usage(shell: Shell) -> None:
    ended = shell("submit", "--gpus", "1")
    assert ended.code == ExitCode.USAGE
    assert "nothing to run" in ended.err


def test_a_command_without_dashes_is_read_as_files(shell: Shell) -> None:
    ended = shell("submit", "--gpus", "1", "python3", "train.py")
    assert ended.code == ExitCode.USAGE
    assert "cannot read python3" in ended.err
    assert "after `--`" in ended.err


def test_options_override_the_fields_of_a_file(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ncpus: 2\nenv: {A: file, B: file}\ncommand: [a]\n---\nname: b\ncommand: [b]\n")
    ended = shell("submit", str(path), "--tenant", "vision", "--env", "A=option")
    assert ended.code == ExitCode.DONE
    jobs = list(standin.jobs.jobs.values())
    assert ended.out.split() == [job.id for job in jobs]
    assert [(job.spec.name, job.spec.tenant) for job in jobs] == [("a", "vision"), ("b", "vision")]
    assert dict(jobs[0].spec.environment) == {"A": "option", "B": "file"}


def test_a_file_may_come_from_stdin(shell: Shell, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"command: [a]\n")))
    assert shell("submit", "-").code == ExitCode.DONE
    assert len(standin.jobs.jobs) == 1


def test_all_jobs_are_validated_before_any_is_submitted(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("command: [a]\n---\ngpus: 9\ncommand: [b]\n---\ngpus: 10\ncommand: [c]\n")
    ended = shell("submit", str(path))
    assert ended.code == ExitCode.FAILED
    assert "2 jobs were rejected" in ended.err
    assert f"{path}:3:1: NEVER_FITS: needs 9 GPUs; the largest node has 8" in ended.err
    assert f"{path}:6:1: NEVER_FITS: needs 10 GPUs" in ended.err
    assert not standin.jobs.jobs
    assert all(request.validate_only for request in standin.jobs.asked)


def test_mistakes_in_several_files_are_reported_together(shell: Shell, tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("retries: many\ncommand: [a]\n")
    ended = shell("submit", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    assert ended.code == ExitCode.USAGE
    assert "a.yaml:1:10: retries:" in ended.err
    assert "b.yaml:1:10: retries:" in ended.err


def test_a_refused_job_shows_code_detail_and_remedy(shell: Shell, standin: Standin) -> None:
    ended = shell("submit", "--gpus", "9", "--", "true")
    assert ended.code == ExitCode.FAILED
    assert ended.err.splitlines() == [
        "error: NEVER_FITS: needs 9 GPUs; the largest node has 8",
        "hint: ask for fewer GPUs on each server, or add a larger one",
    ]


def test_a_violation_found_by_the_queue_points_at_the_file(
    shell: Shell, standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.yaml"
    monkeypatch.setattr("cotenant.cli.jobs.job_file.check_spec", lambda spec, now: ())  # as an older client would
    path.write_text("retries: 5000\nroles: [{name: x, replicas: 0}]\ncommand: [a]\n")
    ended = shell("submit", str(path))
    assert ended.code == ExitCode.USAGE
    assert ended.err.splitlines()[1:] == [
        f"  {path}:1:10: retries: must be from 0 to 1000, not 5000",
        f"  {path}:2:29: roles[0].replicas: must be from 1 to 4096, not 0",
    ]


def test_a_dry_run_submits_nothing(shell: Shell, standin: Standin) -> None:
    ended = shell("submit", "--dry-run", "--gpus", "1", "--", "true")
    assert (ended.code, ended.out) == (ExitCode.DONE, "the job is valid\n")
    assert not standin.jobs.jobs


def test_a_retry_with_the_same_request_id_is_the_same_job(shell: Shell, standin: Standin) -> None:
    first = shell("submit", "--request-id", "monday", "--", "true")
    second = shell("submit", "--request-id", "monday", "--", "true")
    third = shell("submit", "--", "true")
    assert first.out == second.out != third.out
    assert len(standin.jobs.jobs) == 2


def test_json_prints_the_jobs(shell: Shell, standin: Standin) -> None:
    [job] = shell("submit", "--json", "--gpus", "2", "--", "true").json
    assert (job["phase"], job["gpus"], job["cores"]) == ("queued", 2, None)
    assert job["reason"]["code"] == "CAPACITY"


def test_waiting_prints_the_output_on_stdout_and_notes_on_stderr(shell: Shell, standin: Standin) -> None:
    standin.jobs.autopilot = True
    ended = shell("submit", "--gpus", "1", "--cpus", "1", "--wait", "--", *HELLO)
    assert (ended.code, ended.out) == (ExitCode.DONE, "hello\nworld\n")
    [job_id] = standin.jobs.jobs
    assert f"submitted {job_id}" in ended.err
    assert f"{job_id} succeeded after" in ended.err


def test_following_streams_the_output(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    read = tmp_path / "read"
    script = "import os, sys\nprint('hello', flush=True)\nwhile not os.path.exists(sys.argv[1]): pass\nprint('world')"

    async def has_been_read() -> None:
        read.touch()

    standin.jobs.autopilot, standin.jobs.after_piece = True, has_been_read
    ended = shell("submit", "--follow", "--", sys.executable, "-c", script, str(read))
    assert (ended.code, ended.out) == (ExitCode.DONE, "hello\nworld\n")
    assert any(getattr(request, "follow", False) for request in standin.jobs.asked)
    assert ended.err.count("running on gpu-1") == 1  # although each piece of output was a change


def test_waiting_for_a_job_that_fails_fails(shell: Shell, standin: Standin) -> None:
    standin.jobs.autopilot = True
    ended = shell("submit", "--wait", "--", sys.executable, "-c", "print('on my way'); raise SystemExit(3)")
    assert (ended.code, ended.out) == (ExitCode.FAILED, "on my way\n")
    assert ended.err.count("failed: rank 0 on gpu-1 exited with code 3") == 1


def test_waiting_for_several_jobs_prints_all_their_output(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    standin.jobs.autopilot = True
    path = tmp_path / "jobs.yaml"
    path.write_text("command: echo one\n---\ncommand: echo two; exit 1\n")
    ended = shell("submit", "--wait", str(path))
    assert ended.code == ExitCode.FAILED
    assert sorted(ended.out.split()) == ["one", "two"]


def test_waiting_with_json_prints_only_the_ended_jobs(shell: Shell, standin: Standin) -> None:
    standin.jobs.autopilot = True
    ended = shell("submit", "--wait", "--json", "--", *HELLO)
    [job] = ended.json
    assert (job["phase"], job["attempt"]["exit"]["code"]) == ("succeeded", 0)


def test_waiting_survives_a_restart_of_the_queue(
    shell: Shell, standin: Standin, quick_pauses: Callable[[], None]
) -> None:
    quick_pauses()
    standin.jobs.autopilot = True
    standin.jobs.cut_streams = 3
    ended = shell("submit", "--follow", "--", *HELLO)
    assert (ended.code, ended.out) == (ExitCode.DONE, "hello\nworld\n")
    assert "retrying" in ended.err


def test_output_truncated_at_the_end_is_printed(
    shell: Shell, standin: Standin, quick_pauses: Callable[[], None]
) -> None:
    quick_pauses()
    standin.jobs.autopilot = True
    standin.jobs.cut_logs = 2
    ended = shell("submit", "--wait", "--", *HELLO)
    assert (ended.code, ended.out) == (ExitCode.DONE, "hello\nworld\n")


def test_waiting_ends_if_the_queue_stays_unreachable_and_notes_that_the_job_continues(
    shell: Shell, standin: Standin, quick_pauses: Callable[[], None]
) -> None:
    quick_pauses()
    standin.jobs.cut_streams = 100
    ended = shell("submit", "--wait", "--", "sleep", "60")
    [job_id] = standin.jobs.jobs
    assert (ended.code, ended.out) == (ExitCode.UNREACHABLE, "")
    assert "no longer waiting: the mesh is unreachable; the job continues" in ended.err
    assert f"cotenant cancel {job_id}" in ended.err


def test_waiting_finds_a_mesh_restarted_at_another_address(
    shell: Shell,
    standin: Standin,
    quick_pauses: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    quick_pauses()
    monkeypatch.delenv("COTENANT_ENDPOINT")
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("COTENANT_STATE_DIR", str(tmp_path))
    publish(tmp_path, Endpoints.one(standin.address))
    standin.jobs.autopilot = True
    first = standin.address

    async def restart() -> None:
        await standin.move()
        publish(tmp_path, Endpoints.one(standin.address))

    standin.jobs.before_watch = restart
    ended = shell("submit", "--wait", "--", *HELLO)
    assert (ended.code, ended.out) == (ExitCode.DONE, "hello\nworld\n")
    assert standin.address != first


def test_ctrl_c_ends_waiting_but_not_the_job(standin: Standin) -> None:
    command = [*COTENANT, "submit", "--wait", "--", "sleep", "60"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    reported = waiting.stderr.readline() + waiting.stderr.readline()  # submitted, and queued: it waits now
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=60)
    [job_id] = standin.jobs.jobs
    assert f"submitted {job_id}" in reported
    assert waiting.returncode == ExitCode.INTERRUPTED
    assert (out, "Traceback" in err) == ("", False)
    assert f"cotenant cancel {job_id}" in err
    assert standin.jobs.jobs[job_id].phase == JOB_PHASE_QUEUED


def test_the_example_is_printed(shell: Shell) -> None:
    ended = shell("submit", "--example")
    assert ended.code == ExitCode.DONE
    assert "gpus: 1" in ended.out


@pytest.mark.parametrize(
    ("words", "option"), [(("submit", "--cores", "4"), "--cpus"), (("whatif", "--mem=4GiB"), "--memory")]
)
def test_options_of_other_schedulers_are_explained(shell: Shell, words: tuple[str, ...], option: str) -> None:
    told = shell(*words)
    assert told.code == ExitCode.USAGE
    assert f"hint: did you mean {option}? See `cotenant {words[0]} --help`" in told.err


def test_an_unknown_condition_of_a_dependency_names_those_that_exist(shell: Shell, standin: Standin) -> None:
    told = shell("submit", "--after", "nope:x", "--", "true")
    assert told.code == ExitCode.USAGE
    assert "the conditions before a colon are any, ok, fail, started" in told.err
