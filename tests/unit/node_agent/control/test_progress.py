"""Progress: parsing, rates, the socket, the helper and patterns over output."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import assignment, shell, stop_order
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.control import output_patterns
from cotenant.node_agent.control.output_patterns import PatternMatcher, PatternTimeout
from cotenant.node_agent.control.pattern_process import search
from cotenant.node_agent.control.progress import ProgressTracker, ProgressUpdate, parse_line
from cotenant.node_agent.control.progress_reader import _Listener
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.socket_paths import (
    SOCKET_PATH_BYTES_MAX,
    progress_socket,
    remove_socket_directory,
    socket_directory,
)
from cotenant.v1 import job_pb2


@pytest.mark.parametrize(
    ("line", "progress_update"),
    [
        (b"step=12", ProgressUpdate(12)),
        (b"  step=12   loss=0.3\n", ProgressUpdate(12, 0.3)),
        (b"loss=0.3, step=12", ProgressUpdate(12, 0.3)),
        (b'{"step": 7, "loss": 1e-3, "other": []}', ProgressUpdate(7, 1e-3)),
        (b'{"step": "7"}', ProgressUpdate(7)),
        (b"loss=2", ProgressUpdate(None, 2)),
        (b"step=7.0", ProgressUpdate(7)),
        (b"batch=8 batch_seconds=0.02", ProgressUpdate(batch=(8, 0.02))),
        (b"mlflow_run=1f3c wandb_run=x7 other_run=9", ProgressUpdate(runs=(("mlflow", "1f3c"), ("wandb", "x7")))),
        (b'{"step": 7, "wandb_run": 12}', ProgressUpdate(7)),
        (b"wandb_run=" + b"x" * 129, None),
        (b"batch=8", None),
        (b"batch=8 batch_seconds=nan", None),
        (b"batch=0 batch_seconds=1", None),
        (b"batch=8 batch_seconds=-1", None),
        (b"step=1 batch=inf batch_seconds=1", ProgressUpdate(1)),
        (b"step=-1", None),
        (b"step=1e400", None),
        (b"step=" + b"9" * 30, None),
        (b"step=true loss=x", None),
        (b'{"step": true}', None),
        (b"[1]", None),
        (b'{"step": ', None),
        (b"", None),
        (b"\xff\xfe step=3", ProgressUpdate(3)),
        (b"step=3 phase=validation", ProgressUpdate(3, phase="validation")),
        (b'{"step": 3, "phase": "eval-1.b"}', ProgressUpdate(3, phase="eval-1.b")),
        (b'{"step": 3, "phase": "two words"}', ProgressUpdate(3)),
        (b'{"step": 3, "phase": ["x"]}', ProgressUpdate(3)),
        (b"step=3 phase=" + b"x" * 65, ProgressUpdate(3)),
        (b"phase=validation", None),
    ],
)
def test_a_line_is_parsed_or_ignored(line: bytes, progress_update: ProgressUpdate | None) -> None:
    assert parse_line(line) == progress_update


@given(st.binary(max_size=300))
def test_the_parser_accepts_any_line(line: bytes) -> None:
    progress_update = parse_line(line)
    assert progress_update is None or progress_update.step is None or 0 <= progress_update.step < 2**63


def track_of(*points: tuple[float, int]) -> ProgressTracker:
    track = ProgressTracker()
    for now, step in points:
        track.update(ProgressUpdate(step), now)
    return track


def test_the_rate_is_that_of_the_last_window() -> None:
    slow_then_fast = [(float(now), now) for now in range(100)] + [(100.0 + now, 100 + 10 * now) for now in range(60)]
    assert track_of(*slow_then_fast).rate_per_second(160) == pytest.approx(10)


def test_slow_steps_have_a_rate() -> None:
    assert track_of((0, 1), (50, 2)).rate_per_second(60) == pytest.approx(1 / 50)


def test_lagging_replicas_do_not_change_the_rate() -> None:
    points = [(now + lag / 10, now * 5 - 5 * lag) for now in range(1, 20) for lag in (0, 1, 2) if now > lag]
    track = track_of(*points)
    assert track.step == 95
    assert track.rate_per_second(20) == pytest.approx(5, rel=0.1)


def test_a_restarted_job_is_tracked_from_its_first_step() -> None:
    track = track_of((0, 100), (1, 101), (70, 5), (71, 6))
    assert track.step == 6
    assert track.rate_per_second(71) == pytest.approx(1)


def test_each_phase_has_its_own_rate() -> None:
    track = track_of(*((float(now), now) for now in range(20)))
    track.update(ProgressUpdate(1, phase="validation"), 21.0)
    assert (track.phase, track.rate_per_second(21.0), track.seconds_since_step(21.5)) == ("validation", 0.0, 0.5)
    track.update(ProgressUpdate(11, phase="validation"), 31.0)
    assert track.rate_per_second(31.0) == pytest.approx(1.0)
    assert (track.step, track.phase_step) == (19, 11), "what is validated is no step of the job"
    track.update(ProgressUpdate(18), 31.5)
    assert track.phase == "validation", "a replica that lags is in no phase of its own"
    track.update(ProgressUpdate(20), 32.0)
    assert (track.phase, track.step) == ("", 20)
    track.update(ProgressUpdate(11, loss=9.0, phase="validation"), 32.5)
    assert (track.phase, track.loss) == ("", None)
    track.update(ProgressUpdate(12, phase="validation"), 33.0)
    assert (track.phase, track.phase_step, track.rate_per_second(33.0)) == ("validation", 12, 0.0)


def test_a_loss_belongs_to_the_phase_that_reported_it() -> None:
    track = ProgressTracker()
    track.update(ProgressUpdate(1, loss=0.5), 1.0)
    track.update(ProgressUpdate(1, phase="validation"), 2.0)
    assert track.loss is None
    track.update(ProgressUpdate(2, loss=0.7, phase="validation"), 3.0)
    assert track.loss == 0.7
    track.update(ProgressUpdate(2), 4.0)
    assert track.loss is None


@given(st.lists(st.text(max_size=3), min_size=20, max_size=60))
def test_the_number_of_phases_is_bounded(phases: list[str]) -> None:
    track = ProgressTracker()
    for number, phase in enumerate(phases):
        track.update(ProgressUpdate(number, phase=phase), float(number))
    assert len(track._reached) <= 16


def test_a_silent_job_has_no_rate() -> None:
    assert track_of((0, 1), (1, 2)).rate_per_second(1000) == 0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 2**62)), max_size=60))
def test_a_rate_is_always_finite_and_not_negative(points: list[tuple[float, int]]) -> None:
    track = track_of(*sorted(points))
    rate = track.rate_per_second(1e6)
    assert math.isfinite(rate)
    assert rate >= 0
    assert len(track._points) <= 30 / 0.2 + 3


HELPER = "from cotenant import progress\n"


def run_helper(script: str, path: str = "") -> str:
    variables = {"COTENANT_PROGRESS": path} if path else {}
    done = subprocess.run(
        [sys.executable, "-c", HELPER + script], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout


def waiting_datagrams(receiver: socket.socket) -> list[bytes]:
    receiver.setblocking(False)
    datagrams = []
    while True:
        try:
            datagrams.append(receiver.recv(100))
        except BlockingIOError:
            return datagrams


def test_the_rate_of_a_window_falls_while_a_step_is_overdue() -> None:
    track = ProgressTracker()
    assert track.rate_over(0.0, 5.0) == 0
    for step in range(101):  # ten a second, then two
        track.update(ProgressUpdate(step), step / 10)
    for step in range(101, 113):
        track.update(ProgressUpdate(step), 10 + (step - 100) / 2)
    assert track.rate_over(16.0, 5.0) == pytest.approx(2.0)
    assert track.rate_over(16.0, 1000.0) == pytest.approx(track.rate_per_second(16.0))
    assert track.rate_over(16.4, 5.0) == pytest.approx(2.0)  # the next is not late yet
    assert track.rate_over(20.0, 5.0) == pytest.approx(1 / 4)


@given(st.lists(st.tuples(st.floats(0.001, 20), st.integers(1, 50)), max_size=60), st.floats(0, 100), st.floats(0, 60))
def test_the_rate_of_a_window_never_exceeds_the_fastest_steps(
    steps: list[tuple[float, int]], silence: float, seconds: float
) -> None:
    track, now, step, quickest = ProgressTracker(), 0.0, 0, 0.0
    track.update(ProgressUpdate(0), 0.0)
    for pause, more in steps:
        now, step, quickest = now + pause, step + more, max(quickest, more / pause)
        track.update(ProgressUpdate(step), now)
    assert 0 <= track.rate_over(now + silence, seconds) <= quickest * 1.001


def test_the_helper_does_nothing_outside_of_cotenant() -> None:
    assert run_helper("progress.step(); progress.step(loss=1); print('on')") == "on\n"


def test_the_helper_never_raises(tmp_path: Path) -> None:
    calls = "\n".join(
        [f"progress.step({what})" for what in ("'x'", "loss='y'", "1 << 9999", "loss=object()", "phase=1")]
        + ["print('on')"]
    )
    assert run_helper(calls, str(tmp_path / "absent")) == "on\n"
    assert run_helper(calls, "/" + "x" * 500) == "on\n"


def test_the_helper_always_delivers_its_last_report(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "p"))
        agent.settimeout(60)
        run_helper("for _ in range(1000): progress.step(loss=0.5)", str(tmp_path / "p"))
        lines = waiting_datagrams(agent)
    assert lines[0] == b"step=1 loss=0.5"
    assert lines[-1] == b"step=1000 loss=0.5"
    assert len(lines) < 100


def test_the_helper_reports_the_phase(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "p"))
        run_helper("progress.step(5, loss=0.5, phase='my validation=1')", str(tmp_path / "p"))
        (line,) = waiting_datagrams(agent)
    assert parse_line(line) == ProgressUpdate(5, 0.5, phase="my_validation_1")


def test_the_helper_counts_each_phase_and_keeps_a_loss_until_it_is_reported(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "p"))
        calls = ("", "phase='validation'", "phase='validation'", "loss=0.5", "")
        run_helper("\n".join(f"progress.step({call})" for call in calls), str(tmp_path / "p"))
        first, last = waiting_datagrams(agent)
    assert first == b"step=1"
    assert last.splitlines() == [b"step=2 phase=validation", b"step=2 loss=0.5", b"step=3"]


def test_the_helper_reports_batches_and_steps(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "p"))
        script = "for n in range(1, 9): progress.batch(n, 0.5); progress.step()"
        run_helper(script + "\nprogress.batch('x', 1); progress.batch(1, None)", str(tmp_path / "p"))
        lines = waiting_datagrams(agent)
    assert lines[0] == b"batch=1 batch_seconds=0.5"
    assert sorted(lines[-1].splitlines()) == [b"batch=8 batch_seconds=0.5", b"step=8"]


def test_a_batch_is_kept_until_it_is_reported() -> None:
    track = ProgressTracker()
    track.update(ProgressUpdate(batch=(8, 0.02)), now=1.0)
    track.update(ProgressUpdate(step=1), now=2.0)
    assert track.batch == (8, 0.02)


def test_the_helper_finds_a_restarted_agent(tmp_path: Path) -> None:
    path = str(tmp_path / "p")
    script = f"""
import os, socket
def agent():
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); receiver.bind({path!r}); return receiver
first = agent(); progress.step(1); first.recv(100); first.close(); os.unlink({path!r})
progress.INTERVAL_SECONDS = 0; progress._reporter._not_before = 0
progress.step(2)
second = agent(); progress.step(3); print(second.recv(100))
"""
    assert run_helper(script, path) == "b'step=3'\n"


def test_the_helper_costs_microseconds(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "p"))
        took = run_helper(
            "import time; began = time.perf_counter()\nfor n in range(100_000): progress.step(n, loss=0.1)\n"
            "print((time.perf_counter() - began) / 100_000)",
            str(tmp_path / "p"),
        )
    assert float(took) < 50e-6


def test_a_deep_state_directory_still_has_short_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    path = progress_socket(socket_directory(deep), AttemptKey("j" * 128, 1))
    assert len(str(path)) <= SOCKET_PATH_BYTES_MAX
    assert socket_directory(deep) == socket_directory(deep), "running jobs find the next agent"
    shallow = Path("/tmp")
    assert len(str(progress_socket(shallow, AttemptKey("j", 1)))) <= SOCKET_PATH_BYTES_MAX
    made = socket_directory(deep)
    made.rmdir()
    assert socket_directory(deep) != made, "nobody can know the next one"
    remove_socket_directory(deep)
    assert not list(deep.iterdir())


def test_sockets_are_never_created_in_another_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name used to follow from the path of the state directory: another user could make it first."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    digest = hashlib.sha256(os.fsencode(deep)).hexdigest()[:16]
    guessed = shared / f"cotenant-{os.getuid()}-{digest}"
    guessed.symlink_to(own)
    found = socket_directory(deep)
    assert found != guessed
    assert not list(own.iterdir())
    (deep / "sockets.path").write_text(str(guessed))  # as a record that was restored from elsewhere may say
    assert socket_directory(deep) not in (guessed, own)


@pytest.mark.parametrize("note", ["", ".", "{own}", "{own}/", "cotenant-abcdefgh", "\0", "\udc80"])
def test_a_damaged_record_never_names_another_directory_for_the_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    """An empty record would name the working directory, and a truncated one `/` if the agent is root."""
    own, deep = tmp_path / "own", tmp_path / ("d" * 100)
    for directory in (own, deep, own / "cotenant-abcdefgh"):
        directory.mkdir()
        directory.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(own)
    (deep / "sockets.path").write_bytes(os.fsencode(note.format(own=own)))
    found = socket_directory(deep)
    assert found.parent == tmp_path
    assert found != own
    assert own.stat().st_mode & 0o777 == 0o755
    remove_socket_directory(deep)
    assert own.is_dir()


@pytest.mark.parametrize("note", ["/{there}/cotenant-abcd_123", "{there}/../{name}/cotenant-abcd_123"])
def test_a_record_that_spells_a_directory_oddly_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    deep, made = tmp_path / ("d" * 100), tmp_path / "cotenant-abcd_123"
    for directory in (deep, made):
        directory.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (deep / "sockets.path").write_text(str(made))
    assert socket_directory(deep) == made
    (deep / "sockets.path").write_text(note.format(there=tmp_path, name=tmp_path.name))
    assert not socket_directory(deep).samefile(made)


def test_sockets_of_jobs_that_an_earlier_release_started_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    digest = hashlib.sha256(os.fsencode(deep)).hexdigest()[:16]
    before = tmp_path / f"cotenant-{os.getuid()}-{digest}"
    before.mkdir(mode=0o711)
    assert socket_directory(deep) == before


async def test_a_jobs_progress_reaches_placement(placement: Placement, agent: RunningAgent) -> None:
    tracked = "import os; os.environ['MLFLOW_RUN_ID'] = '1f3c'\n"
    script = HELPER + tracked + "for n in range(1, 6): progress.step(n * 10, loss=1 / n)"
    placement.assign(assignment("teller", [sys.executable, "-c", script]))
    await placement.ended("teller")
    last = await placement.until(
        lambda: next(
            (progress_update for progress_update in placement.progress if progress_update.progress.step == 50), None
        )
    )
    assert (last.job_id, last.number, last.progress.loss) == ("teller", 1, pytest.approx(0.2))
    assert last.progress.tracked_runs == {"mlflow": "1f3c"}
    assert last.progress.update_time.seconds == pytest.approx(time.time(), abs=60)


async def test_batch_times_reach_placement(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(assignment("service", [sys.executable, "-c", HELPER + "progress.batch(8, 0.25)"]))
    await placement.ended("service")
    progress_update = await placement.until(
        lambda: next(
            (progress_update for progress_update in placement.progress if progress_update.progress.batch_size), None
        )
    )
    assert (progress_update.progress.batch_size, progress_update.progress.batch_time.ToTimedelta().total_seconds()) == (
        8,
        0.25,
    )


async def test_progress_is_received_after_a_restart(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    script = HELPER + f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\nprogress.step(77)"
    placement.assign(assignment("teller", [sys.executable, "-c", script]))
    await placement.running("teller")
    await agent.stop()
    await agent.start()
    await placement.connected(2)
    (tmp_path / "go").touch()
    await placement.until(lambda: any(progress_update.progress.step == 77 for progress_update in placement.progress))


async def test_a_flood_is_reported_about_once_a_second(placement: Placement, agent: RunningAgent) -> None:
    flood = (
        "import os, socket, time\nout = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\nn = 0\n"
        "end = time.time() + 2.5\n"
        "while time.time() < end:\n    n += 1\n    out.sendto(b'step=%d' % n, os.environ['COTENANT_PROGRESS'])"
    )
    placement.assign(assignment("flood", [sys.executable, "-c", flood]))
    await placement.ended("flood")
    assert 2 <= len(placement.progress) <= 5


async def test_a_pattern_reads_the_output(placement: Placement, agent: RunningAgent) -> None:
    spec = job_pb2.JobSpec(progress=job_pb2.ProgressRule(regex=r"iter (\d+)/\d+ loss (?P<loss>[\d.]+)"))
    placement.assign(shell("printer", "echo iter 1/9 loss 0.5; printf 'iter 2/9 loss 0.25\\r noise'; echo", spec=spec))
    await placement.ended("printer")
    progress_update = await placement.until(lambda: placement.progress and placement.progress[-1])
    assert (progress_update.progress.step, progress_update.progress.loss) == (2, pytest.approx(0.25))


async def test_a_pattern_that_times_out_only_disables_the_jobs_progress(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    spec = job_pb2.JobSpec(progress=job_pb2.ProgressRule(regex=r"(a+)+$(?=)"))  # an older version's
    placement.assign(shell("evil", "echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab; exec sleep 60", spec=spec))
    await placement.running("evil")
    placement.assign(shell("other", "true"))
    await placement.ended("other")
    placement.send(stops=[stop_order("evil", grace_seconds=1)])
    await placement.ended("evil")


async def test_the_matcher_recovers_from_a_pattern_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = PatternMatcher()
    try:
        monkeypatch.setattr(output_patterns, "SEARCH_SECONDS_MAX", 0.2)
        with pytest.raises(PatternTimeout):
            await matcher.search(r"(a+)+$(?=)", ["a" * 50 + "b"])  # RE2 has no lookahead, Python's engine does
        monkeypatch.setattr(output_patterns, "SEARCH_SECONDS_MAX", 10)
        assert await matcher.search(r"(\d+)", ["1", "2", "x"]) == {"step": "2"}
        answers = await asyncio.gather(*(matcher.search(r"(\d+)", [str(n)]) for n in range(5)))
        assert [answer["step"] for answer in answers] == ["0", "1", "2", "3", "4"]
    finally:
        await matcher.close()


async def test_a_pattern_runs_in_time_linear_in_the_line() -> None:
    matcher = PatternMatcher()
    try:
        assert await matcher.search(r"(a+)+$", ["a" * 4000 + "b"]) == {}
        assert await matcher.search(r"((a+)+)b", ["a" * 4000 + "b"]) == {"step": "a" * 4000}
    finally:
        await matcher.close()


@pytest.mark.parametrize("pattern", ["(", "no group", "(?P<x", "a{99999999999}(b)(?=)"])
def test_an_invalid_pattern_is_reported(pattern: str) -> None:
    assert "error" in search(pattern, ["x"])


def test_a_profile_receives_steps_of_other_phases(tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unused:
        listener = _Listener(AttemptKey("job", 1), tmp_path, unused, None)
        listener.profiled = lambda step, phase, now: heard.append((step, phase))
        for progress_update in (
            ProgressUpdate(7),
            ProgressUpdate(1, phase="validation"),
            ProgressUpdate(2, phase="validation"),
            ProgressUpdate(7),
            ProgressUpdate(8),
        ):
            listener.update(progress_update)
    assert heard == [(7, ""), (1, "validation"), (2, "validation"), (8, "")]
