from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.node_agent.control import epoch_fence as fence_module
from cotenant.node_agent.control.epoch_fence import EpochFence


def test_older_terms_and_epochs_are_refused(tmp_path: Path) -> None:
    fence = EpochFence(tmp_path / "fence")
    assert fence.raise_epoch("a", 5)
    assert fence.raise_epoch("a", 5)
    assert not fence.raise_epoch("a", 4)
    assert fence.raise_epoch("b", 1)
    assert fence.raise_term(3)
    assert not fence.raise_term(2)


def test_removing_the_fence_as_the_remedy_says_accepts_a_new_store(tmp_path: Path) -> None:
    fence = EpochFence(tmp_path / "fence")
    assert fence.raise_term(120)
    asyncio.run(fence.flush())
    assert not EpochFence(tmp_path / "fence").raise_term(5)
    assert f"remove {tmp_path / 'fence'}, and start the agent" in fence.remedy
    (tmp_path / "fence").unlink()
    assert EpochFence(tmp_path / "fence").raise_term(5)


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.booleans()), max_size=30))
def test_flushed_values_survive_a_restart(tmp_path_factory: object, raises: list[tuple[str, int, bool]]) -> None:
    path = tmp_path_factory.mktemp("fence") / "fence"  # type: ignore[attr-defined]  # pytest's own type is hidden
    fence, largest = EpochFence(path), dict.fromkeys("abc", 0)
    for job, epoch, restart in raises:
        assert fence.raise_epoch(job, epoch) == (epoch >= largest[job])
        largest[job] = max(largest[job], epoch)
        if restart:
            asyncio.run(fence.flush())
            fence = EpochFence(path)
    assert {job: fence.epoch_of(job) for job in "abc"} == largest


async def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    fence = EpochFence(tmp_path / "fence")
    fence.raise_term(7)
    fence.raise_epoch("a", 5)
    await fence.flush()
    with (tmp_path / "fence").open("a") as file:
        file.write('{"job": "b", "epo')
    again = EpochFence(tmp_path / "fence")
    assert (again.term, again.epoch_of("a"), again.epoch_of("b")) == (7, 5, 0)


async def test_the_journal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_module, "JOBS_MAX", 10)
    fence = EpochFence(tmp_path / "fence")
    for number in range(100):
        fence.raise_epoch(f"job-{number}", number + 1)
    await fence.flush()
    again = EpochFence(tmp_path / "fence")
    assert len((tmp_path / "fence").read_text().splitlines()) == 11
    assert (again.epoch_of("job-99"), again.epoch_of("job-0")) == (100, 0)


async def test_a_failed_write_is_retried(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    fence = EpochFence(tmp_path / "place" / "fence")
    (tmp_path / "place").rename(tmp_path / "away")
    fence.raise_epoch("a", 5)
    with pytest.raises(OSError, match="No such file"):
        await fence.flush()
    (tmp_path / "away").rename(tmp_path / "place")
    await fence.flush()
    assert EpochFence(tmp_path / "place" / "fence").epoch_of("a") == 5


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
def test_a_damaged_line_leaves_the_others_valid(tmp_path: Path, line: str) -> None:
    path = tmp_path / "fence"
    path.write_bytes(f'{{"term": 3}}\n{line}\n{{"job": "a", "epoch": 5}}\n'.encode(errors="surrogateescape"))
    fence = EpochFence(path)
    assert (fence.term, fence.epoch_of("a")) == (3, 5)
