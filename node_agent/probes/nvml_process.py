"""Asks NVML, in a process of its own that the agent can kill: a call into a driver in trouble may never come back.

Started as `python -I nvml_process.py SYSFS`. Each request is a JSON line {"id", "ask"}, where `ask` is "gpus" or
"readings"; the answer is a JSON line with the same id. Events come as lines without an id as soon as NVML tells of
them: one thread does nothing but wait for them, because NVML keeps only the newest XID for those who ask too late.
Nothing but the standard library and the binding is imported, so that the process stays small.
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
EVENT_PAUSE_SECONDS = 1.0  # after an error, so as not to spin
HARDWARE_SLOWDOWN = 0x08 | 0x80  # slowdown, power brake: nvmlClocksEventReason… in nvml.h
THERMAL_SLOWDOWN = 0x20 | 0x40  # by software, by hardware
RECOVERIES = {1: "reset", 2: "reboot", 3: "drain", 4: "reset", 6: "reset", 7: "reboot"}  # nvmlDeviceGpuRecoveryAction_t


class Nvml:
    """The driver's library, and the GPUs that it has shown."""

    def __init__(self, nvml: Any, sysfs: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self._nvml, self._sysfs, self._tell = nvml, sysfs, tell
        self._handles: dict[str, Any] = {}

    # What is there --------------------------------------------------------------------------------------------

    def gpus(self) -> dict[str, Any]:
        """All GPUs that the driver shows, and those that it does not."""
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
            "minor": self._told(-1, "nvmlDeviceGetMinorNumber", handle),
        }
        self._handles[uuid] = handle
        return gpu

    def _numa_nodes(self, handle: Any, bus_id: str) -> Iterator[int]:
        """What each source says of the nearest NUMA node, the kernel first; none where it does not know."""
        domain, _, rest = bus_id.lower().partition(":")
        try:
            node = int((self._sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            yield node
        words = self._told((), "nvmlDeviceGetMemoryAffinity", handle, NODE_SET_WORDS, AFFINITY_SCOPE_NODE)
        mask = sum(int(word) << (64 * place) for place, word in enumerate(words))
        if mask:
            yield (mask & -mask).bit_length() - 1

    def _number_islands(self, gpus: list[dict[str, Any]]) -> None:
        """Number the sets of GPUs that reach each other over NVLink from 1, in the bus's order; 0: it has no peer."""
        island_of = list(range(len(gpus)))
        for one, other in itertools.combinations(range(len(gpus)), 2):
            if self._linked(gpus[one]["uuid"], gpus[other]["uuid"]):
                joined = island_of[other]
                island_of = [island_of[one] if island == joined else island for island in island_of]
        large = [island for island in dict.fromkeys(island_of) if island_of.count(island) > 1]
        for gpu, island in zip(gpus, island_of, strict=True):
            gpu["island"] = large.index(island) + 1 if island in large else 0

    def _linked(self, one: str, other: str) -> bool:
        """Tell whether two GPUs reach each other over NVLink; a driver that does not say is taken to mean no."""
        nvml = self._nvml
        index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = self._told(None, "nvmlDeviceGetP2PStatus", self._handles[one], self._handles[other], index)
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    # How it is ------------------------------------------------------------------------------------------------

    def readings(self) -> dict[str, Any]:
        """What each GPU's sensors and accounts say now."""
        return {"readings": [self._reading(uuid, handle) for uuid, handle in self._handles.items()]}

    def _reading(self, uuid: str, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        told: dict[str, Any] = {"uuid": uuid}
        try:
            told["processes"] = [
                [process.pid, process.usedGpuMemory or 0]
                for process in self._may(nvml.nvmlDeviceGetComputeRunningProcesses, (), handle)
            ]
            told["utilisation_percent"] = getattr(
                self._may(nvml.nvmlDeviceGetUtilizationRates, None, handle), "gpu", None
            )
            told["temperature_celsius"] = self._may(nvml.nvmlDeviceGetTemperature, None, handle, 0)
            slow = self._slowdown(handle)
            told["hardware_slowdown"] = bool(slow & HARDWARE_SLOWDOWN) and not slow & THERMAL_SLOWDOWN
            told["thermal_slowdown"] = bool(slow & THERMAL_SLOWDOWN)
            _, _, pending, failed = self._may(nvml.nvmlDeviceGetRemappedRows, (0, 0, 0, 0), handle)
            told["remap_pending"], told["remap_failed"] = bool(pending), bool(failed)
            told["retirement_pending"] = bool(self._may(nvml.nvmlDeviceGetRetiredPagesPendingStatus, 0, handle))
            told["recovery"] = self._recovery(handle)
        except nvml.NVMLError as error:
            told["lost"] = error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
            told["error"] = str(error)
        return told

    def _slowdown(self, handle: Any) -> int:
        newer = self._may(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, None, handle)
        if newer is None:
            newer = self._may(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, 0, handle)
        return int(newer)

    def _recovery(self, handle: Any) -> str:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return ""
        values = self._may(self._nvml.nvmlDeviceGetFieldValues, (), handle, [field])
        return "".join(RECOVERIES.get(value.value.uiVal, "") for value in values if value.nvmlReturn == 0)

    def _may(self, ask: Callable[..., Any], otherwise: Any, *arguments: Any) -> Any:
        """Ask for what this GPU or this driver may not have; other errors are raised."""
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

    def _told(self, otherwise: Any, name: str, *arguments: Any) -> Any:
        """Ask for what is not worth an error."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError:
            return otherwise

    # What happens ---------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to tell of events."""
        nvml = self._nvml
        if not self._handles:
            return
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._tell({"no_events": [f"all: {error}"]})
            return
        unwatched = []
        for uuid, handle in self._handles.items():
            try:
                nvml.nvmlDeviceRegisterEvents(
                    handle, nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError, events
                )
            except nvml.NVMLError:
                try:  # one without ECC has XIDs nevertheless
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                except nvml.NVMLError as error:
                    unwatched.append(f"{uuid}: {error}")
        if unwatched:
            self._tell({"no_events": unwatched})
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
                self._tell({"xid": int(event.eventData), "uuid": uuid})
            elif uuid and event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
                self._tell({"double_bit": True, "uuid": uuid})


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


class Wire:
    """Lines to the agent, from two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, message: dict[str, Any]) -> None:
        """Write one line."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), flush=True)


def serve(sysfs: Path, wire: Wire) -> None:
    """Answer until nobody asks any more."""
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
            except Exception as error:  # whatever a driver does; the agent decides what follows
                answer["failed"] = str(error)
        wire.tell(answer)
        if nvml is not None and not watching and request["ask"] == "gpus":
            watching = True
            nvml.watch()


def _open(sysfs: Path, wire: Wire) -> tuple[Nvml | None, dict[str, Any]]:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None, {"absent": True}
    import pynvml  # type: ignore[import-untyped]  # NVIDIA ships no types; here, because it takes 17 MiB

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, {"failed": str(error)}
    return Nvml(pynvml, sysfs, wire.tell), {}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Wire())
