from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.node_agent.control import epoch_fence as fence_module
from cotenant.node_agent.control.epoch_fence import Fence


def test_only_what_is_not_older_is_taken(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "fence")
    assert fence.raise_epoch("a", 5)
    assert fence.raise_epoch("a", 5)
    assert not fence.raise_epoch("a", 4)
    assert fence.raise_epoch("b", 1)
    assert fence.raise_term(3)
    assert not fence.raise_term(2)


def test_who_lets_go_of_a_fence_as_told_obeys_a_store_that_begins_anew(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "fence")
    assert fence.raise_term(120)
    asyncio.run(fence.flush())
    assert not Fence(tmp_path / "fence").raise_term(5)
    assert f"remove {tmp_path / 'fence'}, and start the agent" in fence.remedy
    (tmp_path / "fence").unlink()
    assert Fence(tmp_path / "fence").raise_term(5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.booleans()), max_size=30))
def test_a_restart_forgets_nothing_that_was_flushed(
    tmp_path_factory: object, raises: list[tuple[str, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("fence") / "fence"  # type: ignore[attr-defined]  # pytest's own type is hidden
    fence, largest = Fence(path), dict.fromkeys("abc", 0)
    for job, epoch, restart in raises:
        assert fence.raise_epoch(job, epoch) == (epoch >= largest[job])
        largest[job] = max(largest[job], epoch)
        if restart:
            asyncio.run(fence.flush())
            fence = Fence(path)
    assert {job: fence.epoch_of(job) for job in "abc"} == largest


async def test_a_line_that_a_crash_cut_short_costs_only_itself(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "fence")
    fence.raise_term(7)
    fence.raise_epoch("a", 5)
    await fence.flush()
    with (tmp_path / "fence").open("a") as file:
        file.write('{"job": "b", "epo')
    again = Fence(tmp_path / "fence")
    assert (again.term, again.epoch_of("a"), again.epoch_of("b")) == (7, 5, 0)


async def test_the_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_module, "JOBS_MAX", 10)
    fence = Fence(tmp_path / "fence")
    for number in range(100):
        fence.raise_epoch(f"job-{number}", number + 1)
    await fence.flush()
    again = Fence(tmp_path / "fence")
    assert len((tmp_path / "fence").read_text().splitlines()) == 11
    assert (again.epoch_of("job-99"), again.epoch_of("job-0")) == (100, 0)


async def test_what_could_not_be_written_is_written_the_next_time(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    fence = Fence(tmp_path / "place" / "fence")
    (tmp_path / "place").rename(tmp_path / "away")
    fence.raise_epoch("a", 5)
    with pytest.raises(OSError, match="No such file"):
        await fence.flush()
    (tmp_path / "away").rename(tmp_path / "place")
    await fence.flush()
    assert Fence(tmp_path / "place" / "fence").epoch_of("a") == 5


@pytest.mark.parametrize(
    "line",
    [
        '{"term": Infinity}',
        '{"term": 1' + "0" * 400 + "}",
        '{"job": "a", "epoch": 9223372036854775807}',
        '{"a":' * 3000,
        "\udcff",
        "[]",
        "7",
    ],
    ids=range(7),
)
def test_a_damaged_line_takes_nothing_from_the_others(tmp_path: Path, line: str) -> None:
    path = tmp_path / "fence"
    path.write_bytes(f'{{"term": 3}}\n{line}\n{{"job": "a", "epoch": 5}}\n'.encode(errors="surrogateescape"))
    fence = Fence(path)
    assert (fence.term, fence.epoch_of("a")) == (3, 5)
