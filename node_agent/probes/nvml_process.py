"""Queries NVML in a process of its own that the agent can kill: a call into a failing driver may never return.

Started as `python -I nvml_process.py SYSFS`. Each request is a JSON line {"id", "ask"}, where `ask` is "gpus" or
"readings"; the answer is a JSON line with the same id. Events are lines without an id, written as soon as NVML reports
them: a dedicated thread waits for them, because NVML keeps only the newest XID for late callers. Only the standard
library and the binding are imported, so that the process stays small.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
VENDOR = re.compile(r"^(NVIDIA|Tesla)\s+")
AFFINITY_SCOPE_NODE = 0
NODE_SET_WORDS = 4  # of 64 bits
EVENT_WAIT_MILLISECONDS = 1_000
EVENT_PAUSE_SECONDS = 1.0  # after an error, to avoid a busy loop
HARDWARE_SLOWDOWN = 0x08 | 0x80  # slowdown, power brake: nvmlClocksEventReason… in nvml.h
THERMAL_SLOWDOWN = 0x20 | 0x40  # by software, by hardware
RECOVERIES = {1: "reset", 2: "reboot", 3: "drain", 4: "reset", 6: "reset", 7: "reboot"}  # nvmlDeviceGpuRecoveryAction_t


class Nvml:
    """The driver's library, and the GPUs that it listed."""

    def __init__(self, nvml: Any, sysfs: Path, send: Callable[[dict[str, Any]], None]) -> None:
        self._nvml, self._sysfs, self._send = nvml, sysfs, send
        self._handles: dict[str, Any] = {}

    # Inventory ------------------------------------------------------------------------------------------------

    def gpus(self) -> dict[str, Any]:
        """Return all GPUs that the driver lists, and errors for those it cannot read."""
        found: list[dict[str, Any]] = []
        troubles: list[str] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                found.append(self._read_gpu(index))
            except (self._nvml.NVMLError, UnicodeDecodeError) as error:
                troubles.append(f"GPU {index} is not used: NVML failed: {error}")
        found.sort(key=lambda gpu: (gpu["pci_bus_id"], gpu["uuid"]))
        self._number_islands(found)
        return {"gpus": found, "troubles": troubles}

    def _read_gpu(self, index: int) -> dict[str, Any]:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
        bus_id = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
        uuid = nvml.nvmlDeviceGetUUID(handle)
        gpu = {
            "uuid": uuid,
            "model": VENDOR.sub("", nvml.nvmlDeviceGetName(handle)),
            "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "pci_bus_id": bus_id,
            "numa_node": next(self._numa_nodes(handle, bus_id), -1),
            "minor": self._try_call(-1, "nvmlDeviceGetMinorNumber", handle),
        }
        self._handles[uuid] = handle
        return gpu

    def _numa_nodes(self, handle: Any, bus_id: str) -> Iterator[int]:
        """Yield what each source says about the nearest NUMA node, the kernel first."""
        domain, _, rest = bus_id.lower().partition(":")
        try:
            node = int((self._sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            yield node
        words = self._try_call((), "nvmlDeviceGetMemoryAffinity", handle, NODE_SET_WORDS, AFFINITY_SCOPE_NODE)
        mask = sum(int(word) << (64 * place) for place, word in enumerate(words))
        if mask:
            yield (mask & -mask).bit_length() - 1

    def _number_islands(self, gpus: list[dict[str, Any]]) -> None:
        """Number the sets of GPUs connected by NVLink from 1, in bus order; 0: no peer."""
        island_of = list(range(len(gpus)))
        for one, other in itertools.combinations(range(len(gpus)), 2):
            if self._linked(gpus[one]["uuid"], gpus[other]["uuid"]):
                joined = island_of[other]
                island_of = [island_of[one] if island == joined else island for island in island_of]
        large = [island for island in dict.fromkeys(island_of) if island_of.count(island) > 1]
        for gpu, island in zip(gpus, island_of, strict=True):
            gpu["island"] = large.index(island) + 1 if island in large else 0

    def _linked(self, one: str, other: str) -> bool:
        """Return whether two GPUs are connected by NVLink; False if the driver does not know."""
        nvml = self._nvml
        index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = self._try_call(None, "nvmlDeviceGetP2PStatus", self._handles[one], self._handles[other], index)
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    # Readings -------------------------------------------------------------------------------------------------

    def readings(self) -> dict[str, Any]:
        """Return each GPU's sensors and counters."""
        return {"readings": [self._reading(uuid, handle) for uuid, handle in self._handles.items()]}

    def _reading(self, uuid: str, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        reading: dict[str, Any] = {"uuid": uuid}
        try:
            reading["processes"] = [
                [process.pid, process.usedGpuMemory or 0]
                for process in self._supported(nvml.nvmlDeviceGetComputeRunningProcesses, (), handle)
            ]
            reading["utilisation_percent"] = getattr(
                self._supported(nvml.nvmlDeviceGetUtilizationRates, None, handle), "gpu", None
            )
            reading["temperature_celsius"] = self._supported(nvml.nvmlDeviceGetTemperature, None, handle, 0)
            slow = self._slowdown(handle)
            reading["hardware_slowdown"] = bool(slow & HARDWARE_SLOWDOWN) and not slow & THERMAL_SLOWDOWN
            reading["thermal_slowdown"] = bool(slow & THERMAL_SLOWDOWN)
            _, _, pending, failed = self._supported(nvml.nvmlDeviceGetRemappedRows, (0, 0, 0, 0), handle)
            reading["remap_pending"], reading["remap_failed"] = bool(pending), bool(failed)
            retirement = self._supported(nvml.nvmlDeviceGetRetiredPagesPendingStatus, 0, handle)
            reading["retirement_pending"] = bool(retirement)
            reading["recovery"] = self._recovery(handle)
        except nvml.NVMLError as error:
            reading["lost"] = error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
            reading["error"] = str(error)
        return reading

    def _slowdown(self, handle: Any) -> int:
        newer = self._supported(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, None, handle)
        if newer is None:
            newer = self._supported(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, 0, handle)
        return int(newer)

    def _recovery(self, handle: Any) -> str:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return ""
        values = self._supported(self._nvml.nvmlDeviceGetFieldValues, (), handle, [field])
        return "".join(RECOVERIES.get(value.value.uiVal, "") for value in values if value.nvmlReturn == 0)

    def _supported(self, ask: Callable[..., Any], otherwise: Any, *arguments: Any) -> Any:
        """Call NVML and return `otherwise` if this GPU or driver does not support the call; other errors are raised."""
        nvml = self._nvml
        try:
            return ask(*arguments)
        except nvml.NVMLError as error:
            if error.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION,
                nvml.NVML_ERROR_INVALID_ARGUMENT,
            ):  # fmt: skip
                return otherwise
            raise

    def _try_call(self, otherwise: Any, name: str, *arguments: Any) -> Any:
        """Call NVML and return `otherwise` on any error."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError:
            return otherwise

    # Events ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Start reporting events."""
        nvml = self._nvml
        if not self._handles:
            return
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._send({"no_events": [f"all: {error}"]})
            return
        unwatched = []
        for uuid, handle in self._handles.items():
            try:
                nvml.nvmlDeviceRegisterEvents(
                    handle, nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError, events
                )
            except nvml.NVMLError:
                try:  # a GPU without ECC still has XIDs
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                except nvml.NVMLError as error:
                    unwatched.append(f"{uuid}: {error}")
        if unwatched:
            self._send({"no_events": unwatched})
        threading.Thread(target=self._wait_for_events, args=(events,), daemon=True).start()

    def _wait_for_events(self, events: Any) -> None:
        nvml = self._nvml
        uuid_of = {_address(handle): uuid for uuid, handle in self._handles.items()}
        while True:
            try:
                event = nvml.nvmlEventSetWait(events, EVENT_WAIT_MILLISECONDS)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    time.sleep(EVENT_PAUSE_SECONDS)
                continue
            uuid = uuid_of.get(_address(event.device))
            if uuid and event.eventType == nvml.nvmlEventTypeXidCriticalError:
                self._send({"xid": int(event.eventData), "uuid": uuid})
            elif uuid and event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
                self._send({"double_bit": True, "uuid": uuid})


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


class LineWriter:
    """Writes lines to the agent from two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Write one line."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), flush=True)


def serve(sysfs: Path, wire: LineWriter) -> None:
    """Answer requests until stdin closes."""
    nvml, trouble = _open(sysfs, wire)
    watching = False
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"id": request["id"]}
        if nvml is None:
            answer |= trouble
        else:
            try:
                answer |= nvml.gpus() if request["ask"] == "gpus" else nvml.readings()
                if request["ask"] == "gpus" and not watching:  # before the answer: no event after it is lost
                    nvml.watch()
                    watching = True
            except Exception as error:  # any driver failure; the agent decides what to do
                answer["failed"] = str(error)
        wire.send(answer)


def _open(sysfs: Path, wire: LineWriter) -> tuple[Nvml | None, dict[str, Any]]:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None, {"absent": True}
    import pynvml  # type: ignore[import-untyped]  # NVIDIA ships no types; imported here because it takes 17 MiB

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, {"failed": str(error)}
    return Nvml(pynvml, sysfs, wire.send), {}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), LineWriter())
