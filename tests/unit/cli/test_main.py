from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tests.unit.cli.conftest import COTENANT, Shell
from tests.unit.cli.nodes.test_nodes import completed
from tests.unit.cli.standin import Standin

from cotenant.cli import application, main
from cotenant.cli.aliases import ALIASES
from cotenant.cli.application import ENTRIES
from cotenant.cli.connection import command_error, exit_code
from cotenant.cli.flags import hoist
from cotenant.cli.lazy import FOREIGN_COMMANDS, Entry, load
from cotenant.cli.outcome import ExitCode, unexpected_error
from cotenant.codec.errors import Problem, Violation
from cotenant.core.model.job import JobSpec
from cotenant.v1.job_pb2 import JOB_PHASE_CANCELLED

OWN = [entry for entry in ENTRIES if entry.panel in (application.JOBS, application.NODES) or entry.name == "policies"]


def test_help_names_every_command_and_fits_80_columns(shell: Shell) -> None:
    ended = shell("--help")
    assert ended.code == ExitCode.DONE
    for entry in ENTRIES:
        assert f"  {entry.name} " in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80


def test_no_command_is_bad_usage_and_shows_help(shell: Shell) -> None:
    ended = shell()
    assert ended.code == ExitCode.USAGE
    assert "Usage: cotenant" in ended.out


def test_the_version_is_the_package_s(shell: Shell) -> None:
    assert shell("--version").out.startswith("cotenant 0.")


def test_an_unknown_command_suggests_the_nearest_ones(shell: Shell) -> None:
    ended = shell("subnit")
    assert ended.code == ExitCode.USAGE
    assert "unknown command 'subnit'" in ended.err
    assert "did you mean submit?" in ended.err


def test_a_command_of_other_schedulers_suggests_ours(shell: Shell) -> None:
    assert "did you mean status or health?" in shell("ping").err
    known = {entry.name for entry in ENTRIES}
    assert known >= {one for near in FOREIGN_COMMANDS.values() for one in near}
    assert not known & FOREIGN_COMMANDS.keys()


def test_aliases_are_listed_completed_and_run(shell: Shell, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {entry.name for entry in ENTRIES} >= set(ALIASES.values())
    assert not ALIASES.keys() & ({entry.name for entry in ENTRIES} | FOREIGN_COMMANDS.keys())
    assert "  jobs (ls, ps) " in shell("--help").out
    assert shell("ls", "--help").out.startswith("Usage: cotenant ls ")
    job = shell("submit", "--gpus", "1", "--", "true").out.strip()
    assert job in shell("ps").out
    assert shell("rm", job).code == ExitCode.DONE
    assert standin.jobs.jobs[job].phase == JOB_PHASE_CANCELLED
    monkeypatch.setenv("_COTENANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cotenant p")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert {"policies", "predict", "ps"} <= set(completed(shell))


def test_an_unknown_option_refers_to_help(shell: Shell) -> None:
    ended = shell("jobs", "--nodde", "x")
    assert ended.code == ExitCode.USAGE
    assert ended.err.startswith("error: no such option")
    assert "--nodde" in ended.err
    assert "`cotenant jobs --help`" in ended.err


def test_help_imports_neither_grpc_nor_rich() -> None:
    script = (
        "import sys; from cotenant.cli.main import run; run(['--help']);"
        "print([name for name in ('grpc', 'google', 'rich', 'yaml', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]"


def test_a_list_of_jobs_imports_no_logs_tables_or_numbers(tmp_path: Path) -> None:
    script = (
        "import sys; from cotenant.cli.main import run; code = run(['--state-dir', sys.argv[1], 'jobs']);"
        "print([name for name in ('structlog', 'rich', 'numpy', 'yaml') if name in sys.modules], code, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == f"[] {ExitCode.UNREACHABLE:d}"


def modules_of_up() -> str:
    """Return a script that imports what `cotenant up` imports."""
    return (
        "from pathlib import Path; from cotenant.cli.mesh import up; from cotenant.cli.mesh.settings import Settings;"
        "up.mesh_config(Settings(), Path('state'), {})"
    )


@pytest.mark.parametrize("script", [modules_of_up(), "import cotenant.node_agent.__main__"], ids=["up", "agent"])
def test_a_mesh_starts_without_libraries_that_it_does_not_use(script: str, tmp_path: Path) -> None:
    unused = ("rich", "aetcd", "lightgbm", "scipy", "matplotlib", "opentelemetry")
    shown = (
        f"import sys; {script}; print([name for name in {unused} if name in sys.modules], 'structlog' in sys.modules)"
    )
    command = [sys.executable, "-c", shown]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[] True"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_command_loads_and_has_help(entry: Entry) -> None:
    command = load(entry)
    assert command.name == entry.name
    assert command.help


@pytest.mark.parametrize("entry", OWN, ids=lambda entry: entry.name)
def test_help_shows_an_example_and_fits_80_columns(shell: Shell, entry: Entry) -> None:
    ended = shell(entry.name, "--help")
    assert ended.code == ExitCode.DONE
    assert f"cotenant {entry.name}" in ended.out.split("Example", 1)[1]
    assert max(map(len, ended.out.splitlines())) <= 80


def test_a_missing_mesh_address_is_reported_with_a_hint(shell: Shell) -> None:
    ended = shell("jobs")
    assert ended.code == ExitCode.UNREACHABLE
    assert "cotenant up" in ended.err
    assert ended.out == ""


def test_a_closed_port_is_unreachable(shell: Shell) -> None:
    ended = shell("jobs", "--endpoint", "127.0.0.1:1")
    assert ended.code == ExitCode.UNREACHABLE
    assert "cannot be reached" in ended.err


def test_global_options_may_follow_the_command(shell: Shell, tmp_path: Path) -> None:
    before, behind = shell("--state-dir", str(tmp_path), "jobs"), shell("jobs", f"--state-dir={tmp_path}")
    assert before == behind
    assert str(tmp_path) in behind.err


def test_a_wrong_token_is_bad_input(shell: Shell, standin: object) -> None:
    ended = shell("--token", "wrong", "jobs")
    assert ended.code == ExitCode.USAGE
    assert "TOKEN_WRONG" in ended.err


def test_an_internal_error_is_one_line_without_a_traceback(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("cotenant.cli.jobs.list_jobs.with_mesh", broken)
    monkeypatch.setattr("cotenant.cli.jobs.list_jobs.Flags.of", broken)
    ended = shell("jobs")
    assert ended.code == ExitCode.FAILED
    assert ended.err.startswith("error: internal error: RuntimeError: a bug")


@pytest.mark.parametrize(
    ("error", "told", "hint"),
    [
        (RuntimeError("can't start new thread"), "no process or thread can be started: can't", "pids.max"),
        (OSError(errno.EMFILE, "Too many open files"), "no file descriptor is left: [Errno 24]", "ulimit -n"),
        (MemoryError(), "no memory is left: no message", "free memory"),
    ],
)
def test_a_process_at_its_limits_says_so_instead_of_asking_for_a_report(error: Exception, told: str, hint: str) -> None:
    shown = unexpected_error(error, {})
    assert shown.message.startswith(told)
    assert hint in shown.hint
    assert "report" not in shown.hint


def test_a_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(context: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setenv("COTENANT_DEBUG", "1")
    monkeypatch.setattr("cotenant.cli.jobs.list_jobs.Flags.of", broken)
    assert main.run(["jobs"]) == ExitCode.FAILED
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, ExitCode.UNREACHABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ExitCode.UNREACHABLE),
        (grpc.StatusCode.INVALID_ARGUMENT, ExitCode.USAGE),
        (grpc.StatusCode.NOT_FOUND, ExitCode.USAGE),
        (grpc.StatusCode.UNAUTHENTICATED, ExitCode.USAGE),
        (grpc.StatusCode.FAILED_PRECONDITION, ExitCode.FAILED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ExitCode.FAILED),
        (grpc.StatusCode.INTERNAL, ExitCode.FAILED),
    ],
)
def test_statuses_become_exit_codes(code: grpc.StatusCode, expected: ExitCode) -> None:
    assert exit_code(code) == expected


def test_a_refusal_shows_its_code_and_its_remedy() -> None:
    problem = Problem(
        grpc.StatusCode.FAILED_PRECONDITION, "NEVER_FITS", "needs 9 GPUs", metadata={"remedy": "add a server"}
    )
    error = command_error(problem)
    assert (error.message, error.hint, error.code) == ("NEVER_FITS: needs 9 GPUs", "add a server", ExitCode.FAILED)


def test_every_violation_has_its_own_line() -> None:
    violations = [Violation("spec.name", "is too long"), Violation("spec.roles[0].replicas", "must be positive")]
    error = command_error(Problem(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "bad", violations=violations))
    assert error.details == ("spec.name: is too long", "spec.roles[0].replicas: must be positive")


def test_an_argument_that_is_not_utf8_is_bad_usage() -> None:
    ended = subprocess.run([*COTENANT, "show", b"\xff"], capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.USAGE
    assert "argument 2 is not UTF-8 text" in ended.stderr


def test_a_terminal_that_lacks_a_character_does_not_fail(standin: Standin, spec: JobSpec) -> None:
    job = standin.call(standin.jobs.add, spec)
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([*COTENANT, "show", job.id], capture_output=True, text=True, check=False, env=env)
    assert ended.returncode == ExitCode.DONE
    assert "1 ? (1 GPU, 4 cores)" in ended.stdout


def test_a_closed_output_is_not_an_error() -> None:
    script = f"{shlex.join(COTENANT)} submit --example | head -n 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (ExitCode.DONE, "")
    assert ended.stdout.startswith("# A job file")


def test_a_commands_own_option_is_not_hoisted() -> None:
    given: dict[str, str] = {}
    assert hoist(["--token", "a", "--state-dir", "b"], given, own={"--state-dir"}) == ["--state-dir", "b"]
    assert given == {"token": "a"}
