"""Memory controllers' counters, on trees like the kernel's; on machines that have them they are opened too."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from tests.unit.node_agent.machines import write

from cotenant.node_agent.probes.uncore import Counter, Uncore, find_counters, open_counter, parse_event


def controller(root: Path, name: str, *, cpumask: str = "0,16", kind: int = 14) -> Path:
    device = root / name
    write(device / "type", str(kind))
    write(device / "cpumask", cpumask)
    write(device / "format" / "event", "config:0-7")
    write(device / "format" / "umask", "config:8-15")
    for event, umask in (("cas_count_read", "0x03"), ("cas_count_write", "0x0c")):
        write(device / "events" / event, f"event=0x04,umask={umask}")
        write(device / "events" / f"{event}.scale", "6.103515625e-5")
        write(device / "events" / f"{event}.unit", "MiB")
    return device


def test_reads_and_writes_of_each_controller_and_socket_are_counted(tmp_path: Path) -> None:
    for number in range(2):
        controller(tmp_path, f"uncore_imc_{number}", kind=14 + number)
    controller(tmp_path, "uncore_cha_0")
    found = find_counters(tmp_path)
    assert len(found) == 2 * 2 * 2
    assert found[0] == Counter(type=14, config=0x0304, cpu=0, bytes_each=64.0)
    assert {counter.cpu for counter in found} == {0, 16}


def test_a_controller_with_an_incomplete_description_is_skipped(tmp_path: Path) -> None:
    controller(tmp_path, "uncore_imc_0")
    (controller(tmp_path, "uncore_imc_1") / "events" / "cas_count_write.scale").unlink()
    write(controller(tmp_path, "uncore_imc_2") / "events" / "cas_count_read.unit", "furlongs")
    write(tmp_path / "uncore_imc_free_running_0" / "type", "30")
    assert {counter.type for counter in find_counters(tmp_path)} == {14}
    write(tmp_path / "uncore_imc_0" / "format" / "umask", "config1:0-7")
    with pytest.raises(ValueError, match="unsupported location of umask: config1"):
        parse_event("event=1,umask=2", tmp_path / "uncore_imc_0")


def test_all_counters_are_opened_or_none(tmp_path: Path) -> None:
    controller(tmp_path, "uncore_imc_0")
    opened: list[int] = []

    def refuse_third(counter: Counter) -> int:
        if len(opened) == 2:
            raise PermissionError(13, "Permission denied")
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[-1]

    with pytest.raises(PermissionError):
        Uncore(find_counters(tmp_path), refuse_third)
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert Uncore.open(tmp_path / "absent") is None


def test_counts_are_converted_to_bytes(tmp_path: Path) -> None:
    controller(tmp_path, "uncore_imc_0", cpumask="0")
    write(tmp_path / "count", "")
    (tmp_path / "count").write_bytes(struct.pack("=Q", 1000))
    uncore = Uncore(find_counters(tmp_path), lambda _: os.open(tmp_path / "count", os.O_RDONLY))
    assert uncore.moved_bytes() == 2 * 1000 * 64
    assert uncore.moved_bytes() is None  # the file is at its end, as no counter ever is
    uncore.close()


def test_the_system_call_is_correct() -> None:
    clock = Counter(type=1, config=0, cpu=0, bytes_each=1.0)  # PERF_COUNT_SW_CPU_CLOCK, which every kernel has
    try:
        uncore = Uncore([clock], open_counter)
    except OSError as error:
        pytest.skip(f"needs perf_event_open: {error}")
    first = uncore.moved_bytes()
    assert first is not None
    assert (uncore.moved_bytes() or 0) > first
    uncore.close()
