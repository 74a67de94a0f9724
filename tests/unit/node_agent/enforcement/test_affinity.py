"""The CPU masks of threads after a change of cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.node_agent.jobs import CPUS

from cotenant.node_agent.enforcement.affinity import apply_masks, masks, wanted_mask

CPU_SETS = st.frozensets(st.integers(0, 5), min_size=1)


@given(st.none() | CPU_SETS, CPU_SETS, CPU_SETS, CPU_SETS, CPU_SETS)
def test_a_thread_never_has_cpus_outside_its_task(
    own: frozenset[int] | None,
    now: frozenset[int],
    first: frozenset[int],
    before: frozenset[int],
    after: frozenset[int],
) -> None:
    wanted = wanted_mask(own, now, (first, before, after))
    assert wanted
    assert wanted <= after


@given(CPU_SETS, CPU_SETS, CPU_SETS)
def test_a_change_and_its_reversal_restore_each_mask(
    full: frozenset[int], less: frozenset[int], own: frozenset[int]
) -> None:
    less, own = less & full or full, own & full or full
    narrow = wanted_mask(own, own, (full, full, less))
    assert wanted_mask(own, narrow, (full, less, full)) == own


def test_a_new_thread_follows_its_task() -> None:
    full, less = frozenset({0, 1, 2}), frozenset({0, 1})
    assert wanted_mask(None, less, (full, less, full)) == full
    assert wanted_mask(None, frozenset({1}), (full, less, full)) == {1}


SLEEPERS = """
import os, sys, threading
def sleep(cpus):
    os.sched_setaffinity(0, cpus)
    os.write(1, b"%d\\n" % threading.get_native_id())  # print() writes twice, and the threads would mix
    sys.stdin.read()
for cpus in eval(sys.argv[1]):
    threading.Thread(target=sleep, args=(cpus,)).start()
"""


@pytest.fixture
def sleepers() -> Iterator[subprocess.Popen[str]]:
    """A process with one thread pinned to one CPU and another pinned to two."""
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS, repr([set(CPUS[:1]), set(CPUS[:2])])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def test_threads_keep_their_chosen_cpus_without_a_group(sleepers: subprocess.Popen[str]) -> None:
    one, other, two = frozenset(CPUS[:1]), frozenset(CPUS[1:2]), frozenset(CPUS[:2])
    assert sleepers.stdout
    told = [int(sleepers.stdout.readline()) for _ in range(2)]
    own = masks([sleepers.pid])
    assert sorted(own[thread] for thread in told) == sorted([one, two])
    apply_masks(lambda: [sleepers.pid], own, two, two, other)
    assert {masks([sleepers.pid])[thread] for thread in told} == {other}
    apply_masks(lambda: [sleepers.pid], own, two, other, two)
    assert masks([sleepers.pid]) == own


def test_processes_that_are_gone_are_skipped() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert masks([process.pid]) == {}
    apply_masks(lambda: [process.pid], {}, frozenset({0}), frozenset({0}), frozenset({0}))
