"""Output: written with rotation, read while it is written, uploaded to placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import shell, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.output_reader import OutputReader
from cotenant.node_agent.supervisor.output_file import OutputFile


def read_all(reader: OutputReader) -> tuple[bytes, bool]:
    data, truncated = b"", False
    while (piece := reader.read()).data:
        data, truncated = data + piece.data, truncated or piece.truncated
    return data, truncated


@settings(deadline=None, max_examples=examples(60))
@given(
    steps=st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.just(None)), max_size=40),
    bytes_max=st.integers(2, 64),
)
def test_a_reader_sees_all_output_or_reports_truncation(
    tmp_path_factory: object, steps: list[bytes | None], bytes_max: int
) -> None:
    """`None` is a moment at which the reader looks."""
    path = tmp_path_factory.mktemp("out") / "output-0.log"  # type: ignore[attr-defined]  # pytest's own type is hidden
    writer, reader = OutputFile(str(path), bytes_max), OutputReader(path.parent, 0)
    written, seen, missing = b"", b"", False
    for step in [*steps, None]:
        if step is None:
            data, truncated = read_all(reader)
            seen, missing = seen + data, missing or truncated
        else:
            writer.write(step)
            written += step
    reader.close()
    writer.close()
    assert written.endswith(seen[-1:])
    assert missing or seen == written
    kept = sum(file.stat().st_size for file in path.parent.iterdir())
    assert kept <= bytes_max


def test_a_tail_begins_at_the_right_byte_across_both_files(tmp_path: Path) -> None:
    path = tmp_path / "output-0.log"
    writer = OutputFile(str(path), 20)
    writer.write(b"0123456789abcdef")
    for tail, expected in ((3, b"def"), (8, b"89abcdef"), (16, b"0123456789abcdef"), (99, b"0123456789abcdef")):
        reader = OutputReader(tmp_path, 0, tail_bytes=tail)
        assert read_all(reader) == (expected, False)
        reader.close()
    writer.close()


def test_a_reader_continues_when_the_directory_is_moved(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    writer = OutputFile(str(tmp_path / "here" / "output-0.log"), 10)
    writer.write(b"01234567")
    reader = OutputReader(tmp_path / "here", 0)
    (tmp_path / "here").rename(tmp_path / "there")
    assert read_all(reader) == (b"01234567", False)
    reader.close()
    writer.close()


def test_output_written_just_before_a_rotation_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = OutputFile(str(tmp_path / "output-0.log"), 10), OutputReader(tmp_path, 0)
    writer.write(b"abc")
    assert read_all(reader) == (b"abc", False)
    rotated, late = reader._rotated, [b"defgh"]

    def rotate_then_look() -> bool:
        while late:
            writer.write(late.pop())
        return rotated()

    monkeypatch.setattr(reader, "_rotated", rotate_then_look)
    assert read_all(reader) == (b"defgh", False)
    reader.close()
    writer.close()


def test_a_late_reader_reports_truncation(tmp_path: Path) -> None:
    path = tmp_path / "output-0.log"
    writer = OutputFile(str(path), 10)
    writer.write(b"0123456789abcdef")
    reader = OutputReader(tmp_path, 0)
    data, truncated = read_all(reader)
    assert (data, truncated) == (b"abcdef", True) or (data, truncated) == (b"56789abcdef"[-6:], True)
    reader.close()
    writer.close()


def test_dropped_output_is_counted(tmp_path: Path) -> None:
    writer = OutputFile(str(tmp_path / "absent" / "output-0.log"), 1000)
    writer.write(b"12345")
    writer.write(b"67")
    assert (writer.dropped_bytes, writer.drop_reason) == (7, "No such file or directory")
    (tmp_path / "absent").mkdir()
    writer.write(b"on")
    writer.close()
    note = b"\n[cotenant: 7 bytes of output dropped: No such file or directory]\n"
    assert (tmp_path / "absent" / "output-0.log").read_bytes() == note + b"on"


def read(read_id: str, job_id: str, **more: Any) -> agent_pb2.ReadOutput:
    return agent_pb2.ReadOutput(read_id=read_id, job_id=job_id, number=1, **more)


async def done(placement: Placement, read_id: str) -> bytes:
    await placement.until(lambda: read_id in placement.finished_uploads)
    return placement.output(read_id)


async def test_output_is_sent_for_one_or_all_ranks_in_full_or_as_a_tail(
    placement: Placement, agent: RunningAgent
) -> None:
    placement.assign(shell("pair", "echo rank $RANK", tasks=[task(0), task(1)]))
    await placement.ended("pair")
    orders = [read("all", "pair"), read("one", "pair", rank=1), read("tail", "pair", rank=0, tail_bytes=2)]
    placement.send(reads=orders)
    assert await done(placement, "one") == b"rank 1\n"
    assert await done(placement, "tail") == b"0\n"
    assert sorted((await done(placement, "all")).splitlines()) == [b"rank 0", b"rank 1"]
    by_rank = {piece.rank: piece.data for piece in placement.uploads["all"] if piece.data}
    assert by_rank == {0: b"rank 0\n", 1: b"rank 1\n"}


async def test_following_ends_with_the_attempt(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    placement.assign(shell("talker", f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo two"))
    await placement.running("talker")
    placement.send(reads=[read("f", "talker", follow=True)])
    await placement.until(lambda: placement.output("f") == b"one\n")
    assert "f" not in placement.finished_uploads
    (tmp_path / "go").touch()
    assert await done(placement, "f") == b"one\ntwo\n"


async def test_a_cancelled_read_ends(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("talker", "echo one; exec sleep 60"))
    await placement.running("talker")
    placement.send(reads=[read("f", "talker", follow=True)])
    await placement.until(lambda: placement.output("f") == b"one\n")
    placement.send(reads=[read("f", "talker", follow=True, cancel=True)])
    await done(placement, "f")


async def test_output_of_an_acknowledged_attempt_is_kept(placement: Placement, agent: RunningAgent) -> None:
    placement.acknowledge_ends = True
    placement.assign(shell("past", "echo kept"))
    await placement.ended("past")
    await until((agent.config.state_dir / "kept" / "past-1").exists)
    placement.send(reads=[read("r", "past", follow=True)])
    assert await done(placement, "r") == b"kept\n"


async def test_missing_output_is_reported(placement: Placement, agent: RunningAgent) -> None:
    placement.send(reads=[read("r", "nobody"), read("e", "../../etc")])
    await done(placement, "r")
    await done(placement, "e")
    assert placement.uploads["r"][0].error == "no output of nobody/1 on this node"
    assert "no output" in placement.uploads["e"][0].error


async def test_large_output_arrives_complete(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("much", "seq 1 200000"))
    await placement.running("much")
    placement.send(reads=[read("m", "much", follow=True)])
    assert await done(placement, "m") == b"".join(b"%d\n" % number for number in range(1, 200001))
