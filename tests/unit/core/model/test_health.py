from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.health import PAGE, page

from cotenant.core.model import health
from cotenant.core.model.health import MIB, BootInstance, Finding, GpuProcess, GpuReading, NodeReading, Sign, judge
from cotenant.core.model.health_rules import RULES, Recovery, xid_rule
from cotenant.core.model.node import Gpu, HealthAction, Inventory

BOOT = BootInstance("boot-1", "driver-1")
REBOOTED, RELOADED = BootInstance("boot-2", "driver-2"), BootInstance("boot-1", "driver-2")
GPU = "GPU-a"

rules = st.sampled_from(sorted(RULES))
signs = st.builds(Sign, rules, st.just("it is so"), st.sampled_from(["", "GPU-a", "GPU-b"]), st.sampled_from(["", "1"]))
looks = st.lists(st.tuples(st.lists(signs, max_size=4), st.floats(0, 10_000)), max_size=8)


def after(looks: list[tuple[list[Sign], float]], era: BootInstance = BOOT) -> tuple[Finding, ...]:
    standing: tuple[Finding, ...] = ()
    for number, (seen, elapsed_seconds) in enumerate(looks):
        standing = judge(standing, seen, float(number), elapsed_seconds, era)
    return standing


def told(standing: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(problem.action.value, problem.gpu_uuid) for problem in health.problems(standing)]


# Laws -------------------------------------------------------------------------------------------------------


@given(looks)
def test_there_is_one_finding_of_each_rule_and_gpu_in_a_fixed_order(looks: list[tuple[list[Sign], float]]) -> None:
    standing = after(looks)
    keys = [finding.key for finding in standing]
    assert keys == sorted(set(keys))


@given(looks, st.lists(signs, max_size=4), st.randoms())
def test_the_order_of_signs_does_not_matter(
    looks: list[tuple[list[Sign], float]], seen: list[Sign], rng: object
) -> None:
    apart = list({(sign.gpu_uuid, sign.rule): sign for sign in seen}.values())
    mixed = list(apart)
    rng.shuffle(mixed)  # type: ignore[attr-defined]  # hypothesis says no better
    standing = after(looks)
    assert judge(standing, apart, 9.0, 1.0, BOOT) == judge(standing, mixed, 9.0, 1.0, BOOT)


@given(looks, rules)
def test_each_finding_has_a_way_back(looks: list[tuple[list[Sign], float]], rule: str) -> None:
    standing = after([*looks, ([Sign(rule, "it is so", GPU)], 0.0)])
    calm = standing
    for _ in range(2):
        calm = judge(calm, [], 0.0, 1e6, BOOT)
    assert {RULES[finding.rule].recovery for finding in calm} <= {Recovery.RESET, Recovery.REBOOT, Recovery.RELEASE}
    assert not judge(calm, [], 0.0, 0.0, REBOOTED) or RULES[rule].recovery is Recovery.RELEASE
    assert not any(finding.gpu_uuid == GPU for finding in health.released(standing, [GPU]))


@given(looks, st.floats(0, 1e9))
def test_nothing_that_is_seen_at_each_look_ever_ends(looks: list[tuple[list[Sign], float]], seconds: float) -> None:
    standing = after(looks)
    still = [Sign(finding.rule, "it is so", finding.gpu_uuid, finding.mark) for finding in standing]
    later = judge(standing, still, 0.0, seconds, REBOOTED)
    assert {finding.key for finding in later} == {finding.key for finding in standing}


@given(looks, st.floats(0, 1e9))
def test_while_nvml_is_silent_no_gpu_gets_well(looks: list[tuple[list[Sign], float]], seconds: float) -> None:
    standing = after(looks)
    blind = judge(standing, health.unresponsive_signs([GPU], "it hangs"), 0.0, seconds, BOOT, blind=True)
    before = {finding.key for finding in standing if finding.gpu_uuid and finding.rule != "nvml_silent"}
    assert before <= {finding.key for finding in blind}
    assert GPU in health.unhealthy_gpus(health.problems(blind))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=5))
def test_the_wall_clock_decides_nothing(times: list[float]) -> None:
    standing = judge((), [health.xid_sign(GPU, 79)], 0.0, 0.0, BOOT)
    for now in times:
        standing = judge(standing, [], now, 1.0, BOOT)
    assert told(standing) == [("quarantine", GPU)]


# The table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xid", "action"),
    [(13, "ignore"), (31, "ignore"), (43, "ignore"), (45, "ignore"), (63, "ignore"), (94, "restart"),
     (48, "quarantine"), (64, "quarantine"), (74, "quarantine"), (79, "quarantine"), (95, "quarantine"),
     (119, "quarantine"), (9999, "ignore")],
)  # fmt: skip
def test_what_follows_from_an_xid(xid: int, action: str) -> None:
    standing = judge((), [health.xid_sign(GPU, xid)], 100.0, 0.0, BOOT)
    [problem] = health.problems(standing)
    assert (problem.check, problem.action.value, problem.gpu_uuid, problem.since) == ("xid", action, GPU, 100.0)
    assert problem.reason.startswith(f"XID {xid}: ")


def test_a_reset_heals_what_needs_one_and_only_a_reboot_what_fell_off() -> None:
    standing = judge((), [health.xid_sign(GPU, 48), health.xid_sign("GPU-b", 79)], 0.0, 0.0, BOOT)
    assert told(judge(standing, [], 0.0, 1e6, BOOT)) == [("quarantine", GPU), ("quarantine", "GPU-b")]
    assert told(judge(standing, [], 0.0, 0.0, RELOADED)) == [("quarantine", "GPU-b")]
    assert told(judge(standing, [], 0.0, 0.0, REBOOTED)) == []


def test_a_repeated_event_is_reported_again() -> None:
    standing = judge((), [health.xid_sign(GPU, 94)], 10.0, 0.0, BOOT)
    standing = judge(standing, [health.xid_sign(GPU, 94)], 20.0, 10.0, BOOT)
    [problem] = health.problems(standing)
    assert problem.since == 20.0
    assert told(judge(standing, [], 0.0, xid_rule(94).calm_seconds, BOOT)) == []


def test_thermal_slowdown_is_reported_late_and_hardware_slowdown_holds() -> None:
    hot = health.gpu_signs(GpuReading(GPU, thermal_slowdown=True, temperature_celsius=91))
    standing = judge((), hot, 0.0, 0.0, BOOT)
    assert told(standing) == []
    standing = judge(standing, hot, 0.0, 300.0, BOOT)
    [problem] = health.problems(standing)
    assert (problem.action, problem.reason[-9:]) == (HealthAction.IGNORE, ", at 91 °C"[-9:])
    braked = health.gpu_signs(GpuReading(GPU, hardware_slowdown=True))
    standing = judge(judge((), braked, 0.0, 0.0, BOOT), braked, 0.0, 60.0, BOOT)
    assert told(standing) == [("hold", GPU)]
    assert told(judge(standing, [], 0.0, 60.0, BOOT)) == [("hold", GPU)]
    assert told(judge(standing, [], 0.0, 120.0, BOOT)) == []


@pytest.mark.parametrize(
    ("reading", "action"),
    [(GpuReading(GPU, lost=True), "quarantine"), (GpuReading(GPU, remap_failed=True), "quarantine"),
     (GpuReading(GPU, remap_pending=True), "hold"), (GpuReading(GPU, retirement_pending=True), "hold"),
     (GpuReading(GPU, recovery="reset"), "quarantine"), (GpuReading(GPU, recovery="reboot"), "quarantine"),
     (GpuReading(GPU, recovery="drain"), "hold")],
)  # fmt: skip
def test_what_follows_from_a_reading(reading: GpuReading, action: str) -> None:
    assert told(judge((), health.gpu_signs(reading), 0.0, 0.0, BOOT)) == [(action, GPU)]
    assert health.gpu_signs(GpuReading(GPU)) == []


def test_foreign_processes_are_named_and_beside_our_job_only_hold() -> None:
    stranger = GpuProcess(7, 3 * MIB, "python", "eve")
    [sign] = health.foreign_process_signs(GpuReading(GPU, processes=(stranger,)))
    assert (sign.rule, sign.detail) == (
        "foreign_process", "held by pid 7 (python of eve) with 3 MiB, not started by us",
    )  # fmt: skip
    ours = GpuProcess(8, name="train", ours=True)
    [beside] = health.foreign_process_signs(GpuReading(GPU, processes=(ours, stranger)))
    assert RULES[beside.rule].action is HealthAction.HOLD
    assert health.foreign_process_signs(GpuReading(GPU, processes=(ours,))) == []
    several = tuple(GpuProcess(pid) for pid in range(9, 14))
    for count, more in ((1, ""), (3, ""), (4, " and 1 more"), (5, " and 2 more")):
        [gone] = health.foreign_process_signs(GpuReading(GPU, processes=several[:count]))
        named = ", ".join(f"pid {one.pid} (which is gone)" for one in several[: min(count, 3)])
        assert gone.detail == f"held by {named}{more}, not started by us"
        assert gone.mark == " ".join(str(one.pid) for one in several[:count])


@pytest.mark.parametrize(
    ("rule", "reading", "begins", "ends"),
    [
        ("disk_low", lambda free: NodeReading(disk_free_bytes=free), 256 * MIB, 512 * MIB),
        ("disk_low", lambda free: NodeReading(inodes_free=free), 1000, 2000),
        ("memory_low", lambda free: NodeReading(memory_available_bytes=free, memory_bytes=1000), 15, 30),
        ("memory_stall", lambda percent: NodeReading(memory_stall_percent=percent), 40, 20),
        ("overload", lambda load: NodeReading(load=load, cpus=2), 100, 50),
        ("descriptors_low", lambda free: NodeReading(descriptors_free=free, descriptors_max=100), 32, 64),
    ],
)
def test_a_node_finding_begins_beyond_one_threshold_and_clears_at_another(
    rule: str, reading: Callable[[int], NodeReading], begins: int, ends: int
) -> None:
    worse, others = (-1 if begins < ends else 1), sorted(RULES.keys() - {rule})
    for standing, limit in (((), begins), (others, begins), ([rule], ends)):
        assert health.node_signs(reading(limit), standing) == []
        assert [sign.rule for sign in health.node_signs(reading(limit + worse), standing)] == [rule]


def test_a_disk_that_cannot_be_written_drains_the_node_after_a_while() -> None:
    signs = health.node_signs(NodeReading(disk_error="Read-only file system"))
    standing = judge((), signs, 0.0, 0.0, BOOT)
    assert told(standing) == []
    standing = judge(standing, signs, 0.0, 30.0, BOOT)
    assert told(standing) == [("drain", "")]
    ill = health.node_problem(Inventory(problems=health.problems(standing)))
    assert ill is not None
    assert (ill.action, "Read-only file system" in ill.reason) == (HealthAction.DRAIN, True)


def test_only_new_problems_restart_attempts_and_quarantine_stops_while_it_lasts() -> None:
    standing = judge((), [health.xid_sign(GPU, 94), health.xid_sign("GPU-b", 79)], 5.0, 0.0, BOOT)
    now = Inventory(gpus=(Gpu(GPU), Gpu("GPU-b")), problems=health.problems(standing))
    assert health.gpus_to_restart(None, now) == {GPU, "GPU-b"}
    assert health.gpus_to_restart(now, now) == {"GPU-b"}
    again = judge(standing, [health.xid_sign(GPU, 94)], 6.0, 1.0, BOOT)
    assert health.gpus_to_restart(now, dataclasses.replace(now, problems=health.problems(again))) == {GPU, "GPU-b"}


def test_the_page_matches_the_table() -> None:
    assert PAGE.read_text() == page(), "make docs"


def test_every_rule_has_a_meaning_and_a_source() -> None:
    assert all(rule.meaning and rule.source and rule.remedy for rule in RULES.values())
    assert all(rule.event or rule.recovery is not Recovery.CALM or rule.calm_seconds >= 0 for rule in RULES.values())


readings = st.builds(
    GpuReading,
    st.just(GPU),
    error=st.sampled_from(["", "unknown error"]),
    lost=st.booleans(),
    hardware_slowdown=st.booleans(),
    thermal_slowdown=st.booleans(),
    temperature_celsius=st.none() | st.just(91.0),
    remap_failed=st.booleans(),
    remap_pending=st.booleans(),
    retirement_pending=st.booleans(),
    recovery=st.sampled_from(["", "reset", "reboot", "drain"]),
    processes=st.sampled_from([(), (GpuProcess(7, name="python"),)]),
)


@given(readings)
def test_each_sign_of_a_reading_names_its_gpu_and_a_rule_and_says_what_is_wrong(reading: GpuReading) -> None:
    for sign in health.gpu_signs(reading):
        assert sign.gpu_uuid == GPU
        assert sign.rule in RULES
        assert sign.detail not in ("", GPU)
    if reading.error and not reading.lost:
        assert reading.error in health.gpu_signs(reading)[0].detail
