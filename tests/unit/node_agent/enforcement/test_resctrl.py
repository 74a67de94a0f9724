"""Memory bandwidth through resctrl: classes and counters are few, and the kernel refuses in several ways."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.node_agent.fake_resctrl import FakeKernel
from tests.unit.node_agent.jobs import shell

from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.enforcement.bandwidth_share import BandwidthShare
from cotenant.node_agent.enforcement.hook import EnforcedAttempt, ThrottleChange
from cotenant.node_agent.enforcement.resctrl import BandwidthRefused, Resctrl
from cotenant.node_agent.probes.memory_bandwidth import NodeBandwidth


def both(tmp_path: Path, **hardware: int) -> tuple[FakeKernel, Resctrl]:
    kernel = FakeKernel(tmp_path, **hardware)  # type: ignore[arg-type]  # numbers only
    return kernel, Resctrl(tmp_path, kernel)


def inside(group: Path) -> set[str]:
    return set((group / "tasks").read_text().split())


def groups(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob("*/schemata")}


def test_an_attempt_is_throttled_monitored_and_released(tmp_path: Path) -> None:
    _, resctrl = both(tmp_path)
    assert resctrl.monitor("a-1", lambda: [1, 2])
    assert inside(tmp_path / "mon_groups" / "a-1") == {"1", "2"}
    assert resctrl.throttle("a-1", 42, lambda: [1, 2, 99]) == 50  # 99 has ended meanwhile
    held = tmp_path / "cotenant-50"
    assert "MB:0=50;1=50" in (held / "schemata").read_text()
    assert inside(held / "mon_groups" / "a-1") == {"1", "2"}
    assert not (tmp_path / "mon_groups" / "a-1").exists()
    assert resctrl.throttle("a-1", 100, lambda: [1, 2]) == 100
    assert groups(tmp_path) == set()
    assert inside(tmp_path / "mon_groups" / "a-1") == {"1", "2"}
    resctrl.forget("a-1")
    assert list((tmp_path / "mon_groups").iterdir()) == []


def test_attempts_with_the_same_share_use_one_class(tmp_path: Path) -> None:
    _, resctrl = both(tmp_path, classes=2)
    assert resctrl.throttle("a-1", 20, lambda: [1]) == 20
    assert resctrl.throttle("b-1", 20, lambda: [2]) == 20
    with pytest.raises(BandwidthRefused, match="all of the hardware's classes of service are in use"):
        resctrl.throttle("b-1", 50, lambda: [2])
    assert inside(tmp_path / "cotenant-20" / "mon_groups" / "b-1") == {"2"}  # as it was
    resctrl.throttle("a-1", 100, lambda: [1])
    assert groups(tmp_path) == {"cotenant-20"}
    resctrl.throttle("b-1", 100, lambda: [2])
    assert resctrl.throttle("b-1", 50, lambda: [2]) == 50


def test_groups_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    kernel, resctrl = both(tmp_path)
    kernel.make(tmp_path / "operators")
    resctrl.throttle("a-1", 50, lambda: [1])
    resctrl.throttle("a-1", 100, lambda: [1])
    assert groups(tmp_path) == {"operators"}


def test_the_kernels_reason_is_reported(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path)
    for name in ("min_bandwidth", "bandwidth_gran"):
        (tmp_path / "info" / "MB" / name).write_text("5\n")  # which is not what the kernel then keeps to
    resctrl = Resctrl(tmp_path, kernel)
    with pytest.raises(BandwidthRefused, match=r"refuses 5 %.*MB value 5 out of range \[10,100\]"):
        resctrl.throttle("a-1", 5, lambda: [1])
    assert groups(tmp_path) == set()


def test_an_attempt_is_throttled_even_without_a_free_counter(tmp_path: Path) -> None:
    _, resctrl = both(tmp_path, counters=2)
    assert resctrl.throttle("a-1", 50, lambda: [1]) == 50
    assert inside(tmp_path / "cotenant-50") == {"1"}
    assert resctrl.moved_bytes("a-1") is None
    assert not resctrl.monitor("b-1", lambda: [2])


def test_counters_are_summed_over_sockets_unless_one_is_unavailable(tmp_path: Path) -> None:
    kernel, resctrl = both(tmp_path)
    resctrl.monitor("a-1", lambda: [1])
    own = tmp_path / "mon_groups" / "a-1"
    kernel.count(own, "mbm_total_bytes", 100, 20)
    kernel.count(own, "llc_occupancy", 7, 8)
    assert (resctrl.moved_bytes("a-1"), resctrl.cache_bytes("a-1")) == (120, 15)
    for word in ("Unavailable", "Error", ""):
        kernel.count(own, "mbm_total_bytes", 100, word)
        assert resctrl.moved_bytes("a-1") is None
    assert resctrl.moved_bytes("stranger-1") is None


def test_the_nodes_bandwidth_is_the_sum_of_all_groups(tmp_path: Path) -> None:
    kernel, resctrl = both(tmp_path)
    clock = iter([0.0, 2.0, 4.0, 6.0])
    node = NodeBandwidth(resctrl, now=lambda: next(clock))
    assert (node.enforced, node.peak_bytes_per_second) == (True, 0)
    resctrl.throttle("a-1", 50, lambda: [1])
    kernel.count(tmp_path, "mbm_total_bytes", 1000, 500)
    kernel.count(tmp_path / "cotenant-50", "mbm_total_bytes", 500, 0)
    assert node.window() == 1000
    kernel.count(tmp_path, "mbm_total_bytes", 0, 0)  # it wrapped
    assert node.window() is None
    kernel.count(tmp_path, "mbm_total_bytes", 200, 0)
    assert node.window() == 100
    assert node.peak_bytes_per_second == 1000
    assert NodeBandwidth(resctrl, peak_bytes_per_second=7.0, now=lambda: 0.0).peak_bytes_per_second == 7


def test_shares_in_other_units_are_not_enforced(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, schemata="MB:0=2147483647;1=2147483647")  # mounted with mba_MBps
    resctrl = Resctrl(tmp_path, kernel)
    assert not resctrl.enforces
    with pytest.raises(BandwidthRefused):
        resctrl.throttle("a-1", 50, lambda: [1])
    assert resctrl.throttle("a-1", 100, lambda: [1]) == 100
    assert Resctrl.open(tmp_path / "absent") is None


def test_processes_forked_during_the_move_are_moved_too(tmp_path: Path) -> None:
    _, resctrl = both(tmp_path)
    looks = iter([[1], [1, 2], [1, 2, 3], [1, 2, 3]])
    resctrl.throttle("a-1", 50, lambda: next(looks))
    assert inside(tmp_path / "cotenant-50" / "mon_groups" / "a-1") == {"1", "2", "3"}


def throttled(
    hook: BandwidthShare, name: str, percent: int, now: Throttle = FREE, *, uncertain: bool = False
) -> tuple[int, list[str]]:
    """Return the share that an attempt has after its throttle, and what was refused."""
    attempt = EnforcedAttempt(name, None, lambda: [os.getpid()])
    change = ThrottleChange(attempt, shell("a", ""), Throttle(percent), now, uncertain, lambda _: None)
    hook.throttle(change)
    return change.now.bandwidth_percent, change.refused


def test_the_hook_limits_releases_and_forgets_an_attempt(tmp_path: Path) -> None:
    _, resctrl = both(tmp_path, classes=2)
    hook = BandwidthShare(resctrl)
    assert throttled(hook, "a-1", 42) == (50, [])
    assert str(os.getpid()) in inside(tmp_path / "cotenant-50/mon_groups/a-1")
    share, refused = throttled(hook, "b-1", 20, Throttle(60))
    assert (share, len(refused)) == (60, 1)
    assert throttled(hook, "a-1", 100, FREE) == (100, [])
    assert groups(tmp_path) == {"cotenant-50"}, "nothing seems to change"
    assert throttled(hook, "a-1", 100, FREE, uncertain=True) == (100, [])
    assert groups(tmp_path) == set()
    hook.end("a-1")
    assert list((tmp_path / "mon_groups").iterdir()) == []


def test_the_hook_refuses_shares_on_a_machine_without_them() -> None:
    assert throttled(BandwidthShare(), "a-1", 50) == (100, ["this machine cannot limit its memory bandwidth"])
    assert throttled(BandwidthShare(), "a-1", 100, Throttle(50)) == (100, [])
