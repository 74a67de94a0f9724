"""Any progress that jobs report, valid or not, reaches placement as valid values or not at all."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import PYTHON, assignment, stop_order
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.control import progress_reader
from cotenant.node_agent.control.progress import LINES_MAX, ProgressTracker, ProgressUpdate, newest_lines, parse_line
from cotenant.node_agent.control.rate_meter import MeterTimeouts, RateMeter
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.socket_paths import progress_socket, socket_directory
from cotenant.v1 import job_pb2

MEBIBYTE = 1 << 20
SEND = """
import os, socket, sys
out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
for line in eval(sys.argv[1]):
    try: out.sendto(line.encode(), os.environ['COTENANT_PROGRESS'])
    except OSError as error: print(error.strerror)
"""


async def sent(placement: Placement, *lines: str, job_id: str = "job") -> list[job_pb2.Progress]:
    """Have a job send datagrams as they are; what placement heard."""
    placement.assign(assignment(job_id, [*PYTHON, SEND, repr(lines)]))
    await placement.ended(job_id)
    return [told.progress for told in placement.progress if told.job_id == job_id]


@pytest.mark.parametrize(
    "line", ["x" * MEBIBYTE, "step=" + "7" * MEBIBYTE, "[" * MEBIBYTE, '{"step": "' + "9" * MEBIBYTE]
)
def test_a_line_of_a_mebibyte_is_parsed_only_up_to_the_limit(line: str) -> None:
    began = time.process_time()
    assert parse_line(line.encode()) is None
    assert time.process_time() - began < 0.1


async def test_a_datagram_of_a_mebibyte_is_dropped_alone(placement: Placement, agent: RunningAgent) -> None:
    script = f"['step=1 ' + 'x' * {MEBIBYTE}, 'y' * {MEBIBYTE}, 'step=3']"
    placement.assign(assignment("job", [*PYTHON, SEND, script]))
    await placement.ended("job")
    assert [told.progress.step for told in placement.progress][-1] == 3


async def test_a_line_of_a_mebibyte_in_the_output_is_dropped_alone(placement: Placement, agent: RunningAgent) -> None:
    spec = job_pb2.JobSpec(progress=job_pb2.ProgressRule(regex=r"step (\d+)"))
    script = f"print('step 1'); print('x' * {MEBIBYTE}); print('step 2 ' + 'y' * {MEBIBYTE}); print('step 3')"
    placement.assign(assignment("job", [*PYTHON, script], spec=spec))
    await placement.ended("job")
    assert [told.progress.step for told in placement.progress][-1] == 3


@pytest.mark.parametrize("step", ["nan", "inf", "-inf", "-1", "-5.5", "1e309"])
async def test_invalid_steps_are_not_reported(placement: Placement, agent: RunningAgent, step: str) -> None:
    assert await sent(placement, f"step={step}", json.dumps({"step": float(step)})) == []


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "-3.5", "0"])
async def test_losses_of_any_kind_are_passed_on_with_their_step(
    placement: Placement, agent: RunningAgent, loss: str
) -> None:
    (told,) = await sent(placement, f"step=5 loss={loss}")
    assert told.step == 5
    assert told.loss == pytest.approx(float(loss), nan_ok=True)


async def test_one_step_or_decreasing_steps_have_no_rate(placement: Placement, agent: RunningAgent) -> None:
    told = await sent(placement, "step=50", "step=40", "step=30", "step=0")
    assert {(one.step, one.rate_per_second) for one in told} == {(50, 0.0)}


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(0, 2**62)), max_size=50))
def test_jumping_clocks_and_steps_give_valid_rates(points: list[tuple[float, int]]) -> None:
    track, meter = ProgressTracker(), RateMeter(3, MeterTimeouts(0, 0), 0.0)
    for now, step in points:
        track.update(ProgressUpdate(step), now)
        rate = track.rate_per_second(now)
        assert math.isfinite(rate)
        assert rate >= 0
        if measured := meter.update(step, now):
            assert math.isfinite(measured.rate_per_second)
            assert measured.rate_per_second > 0


async def test_the_wall_clock_does_not_affect_rates(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**9, 0, -3600))
    backwards = SimpleNamespace(time=lambda: float(next(clock)), monotonic=time.monotonic)
    monkeypatch.setattr(progress_reader, "time", backwards)
    script = "from cotenant import progress\nimport time\nfor _ in range(15): time.sleep(0.1); progress.step()"
    placement.assign(assignment("job", [sys.executable, "-c", script]))
    await placement.ended("job")
    last = placement.progress[-1].progress
    assert last.step == 15
    assert 0 < last.rate_per_second < 10.5


async def test_jobs_with_the_same_name_are_distinguished_by_id(placement: Placement, agent: RunningAgent) -> None:
    spec = job_pb2.JobSpec(name="twin")
    for job_id, step in (("a", 11), ("b", 22)):
        placement.assign(assignment(job_id, [*PYTHON, SEND, f"['step={step}']"], spec=spec))
    for job_id, step in (("a", 11), ("b", 22)):
        await placement.ended(job_id)
        assert {told.progress.step for told in placement.progress if told.job_id == job_id} == {step}


async def test_a_job_cannot_choose_its_progress_socket(placement: Placement, agent: RunningAgent) -> None:
    victims = str(progress_socket(socket_directory(agent.config.state_dir), AttemptKey("victim", 1)))
    placement.assign(assignment("victim", ["sleep", "600"]))
    await placement.running("victim")
    spec = job_pb2.JobSpec(environment={"COTENANT_PROGRESS": victims})
    placement.assign(assignment("claimant", [*PYTHON, SEND, "['step=9']"], spec=spec))
    await placement.ended("claimant")
    assert {told.job_id for told in placement.progress} == {"claimant"}


async def test_a_job_that_replaces_another_jobs_socket_affects_no_others(
    placement: Placement, agent: RunningAgent
) -> None:
    path = str(progress_socket(socket_directory(agent.config.state_dir), AttemptKey("victim", 1)))
    script = "import os, socket; os.unlink(%r); socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind(%r)"
    placement.assign(assignment("victim", ["sleep", "600"]))
    await placement.running("victim")
    placement.assign(assignment("thief", [*PYTHON, script % (path, path)]))
    assert (await placement.ended("thief")).state == job_pb2.ATTEMPT_STATE_SUCCEEDED
    placement.send(stops=[stop_order("victim", grace_seconds=0)])
    await placement.ended("victim")
    assert [told.step for told in await sent(placement, "step=4", job_id="other")] == [4]


def test_the_last_lines_of_a_large_datagram_count() -> None:
    lines = [b"step=%d" % step for step in range(9_000)]
    assert newest_lines(b"\n".join(lines)) == lines[-LINES_MAX:]
    assert newest_lines(b"x" * 9_000 + b"\nstep=1") == [b"step=1"]
    assert len(newest_lines(b"\n" * 65_536)) == LINES_MAX


@pytest.mark.parametrize("data", [b"step=1\n" * 9_000, b"\n" * 65_000], ids=["steps", "nothing"])
async def test_jobs_that_flood_their_sockets_do_not_block_the_agent(tmp_path: Path, data: bytes) -> None:
    taken = 0

    def told(*_: object) -> None:
        """Drop all reports."""

    reader = progress_reader.ProgressReader(tmp_path, told)
    key = AttemptKey("job", 1)
    reader.watch(key, "", lambda: None)
    [listener] = reader._listeners.values()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        for _ in range(5):
            begun = time.thread_time()
            for _ in range(progress_reader.DATAGRAMS_PER_ROUND):
                with suppress(BlockingIOError):
                    out.sendto(data, str(listener.path))
            reader._drain(listener)
            taken += time.thread_time() - begun < 0.1
    assert taken, "a round takes the agent's loop for longer than a tenth of a second"
    await reader.close()


async def test_an_end_is_reported_if_the_socket_directory_is_read_only(tmp_path: Path) -> None:
    key, sockets = AttemptKey("j", 1), tmp_path / "sockets"
    sockets.mkdir()
    reader = progress_reader.ProgressReader(sockets, lambda *_: None)
    reader.watch(key, "", lambda: None)
    (path,) = sockets.iterdir()
    path.unlink()
    path.mkdir()  # as on a disk that became read-only, unlink fails for everyone
    await reader.finish(key)
    assert key not in reader._listeners
    await reader.close()
