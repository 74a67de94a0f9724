"""The table of what may be wrong with a node or a GPU, what follows, and the way back from each.

What an XID means is NVIDIA's word: "Analyzing Xid Errors with the Xid Catalog" of the documentation for GPU deployment
(docs.nvidia.com/deploy/xid-errors), whose buckets for what is to be done at once stand beside each row. Buckets become
actions: RESET_GPU is a quarantine until a reset, RESTART_BM, RESTART_VM and CHECK_MECHANICALS one until a reboot,
RESTART_APP a restart where the error was not the program's own doing. XIDs that mostly tell of the program's own error
(13, 31, 43, 45, 68 and their like) are ignored: the program ends by itself, and its failure is classified by its exit.
Where an XID is grave or not by its parts, which the event does not tell, it is NVML's word for what recovers the GPU
that counts. Of an XID that the table does not know people are told, and nothing else follows: it is NVML's readings
that decide about the GPU then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cotenant.core.model.node import HealthAction

TABLE_VERSION = 3  # raised with each change of what follows from something
MINUTE_SECONDS, HOUR_SECONDS = 60.0, 3600.0
CALM_SECONDS = 45.0  # a node is back within a minute of its recovery, with a look every few seconds
XID_CATALOG = "NVIDIA, Xid Catalog"
PAGE_RETIREMENT = "NVIDIA, Dynamic Page Retirement"
ROW_REMAPPING = "NVIDIA, GPU Memory Error Management"
NVML_REFERENCE = "NVIDIA, NVML API Reference"
OWN = "ours"


class Recovery(StrEnum):
    """What ends a finding. An operator's release ends each; what is still so is found again."""

    CALM = "calm"  # by itself, once it has not been seen for some time
    RESET = "reset"  # the driver is loaded anew, or the machine has booted
    REBOOT = "reboot"  # the machine has booted
    RELEASE = "release"  # nothing but an operator


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that may be wrong.

    It is told once it has lasted for `after_seconds`; where it recovers by calm, it is over when it has not been seen
    for `calm_seconds`. An `event` is seen once, everything else for as long as it is so.
    """

    name: str
    check: str
    meaning: str
    action: HealthAction
    recovery: Recovery = Recovery.CALM
    after_seconds: float = 0.0
    calm_seconds: float = 0.0
    event: bool = False
    source: str = OWN

    @property
    def remedy(self) -> str:
        """What ends it, in one sentence."""
        match self.recovery:
            case Recovery.CALM if self.calm_seconds:
                return f"it is over once it has not been seen for {_span(self.calm_seconds)}"
            case Recovery.CALM:
                return "it is over as soon as it is no longer so"
            case Recovery.RESET:
                return "load the driver anew or reboot; or reset the GPU and release it"
            case Recovery.REBOOT:
                return "reboot the machine, or release the GPU"
        return "release the GPU once it has been seen to"


def _span(seconds: float) -> str:
    return f"{seconds / MINUTE_SECONDS:g} min" if seconds >= MINUTE_SECONDS else f"{seconds:g} s"


def _xid(number: int, meaning: str, bucket: str, action: HealthAction, recovery: Recovery = Recovery.CALM) -> Rule:
    calm_seconds = HOUR_SECONDS if recovery is Recovery.CALM else 0.0
    source = f"{XID_CATALOG}: {bucket}" if bucket else OWN
    return Rule(f"xid_{number}", "xid", meaning, action, recovery, calm_seconds=calm_seconds, event=True,
                source=source)  # fmt: skip


# Each with NVIDIA's bucket for what is to be done at once.
_IGNORED_XIDS = {
    8: ("GPU stopped processing: a channel timed out", "RESTART_APP"),
    11: ("invalid or corrupted push buffer stream", "RESTART_APP"),
    13: ("graphics engine exception, as of an access out of bounds", "RESTART_APP"),
    25: ("invalid or illegal push buffer stream", "RESTART_APP"),
    31: ("GPU memory page fault, as of an illegal address", "RESTART_APP"),
    43: ("the program has run into a fault of its own and its channel was reset", "IGNORE"),
    44: ("graphics engine fault during a context switch", "IGNORE"),
    45: ("pre-emptive clean-up after the program was ended or an earlier error", "WORKFLOW_XID_45, by another XID"),
    63: ("a page was retired or a row marked for remapping; what is pending is read from NVML", "IGNORE"),
    66: ("an access of the driver that was not allowed", "IGNORE"),
    67: ("an access of the driver that was not allowed", "IGNORE"),
    68: ("video decoder exception", "RESTART_APP"),
    69: ("graphics engine class error", "RESTART_APP"),
    92: ("many single-bit ECC errors, all corrected", "IGNORE"),
    121: ("corrected error on the link to the CPU", "IGNORE"),
    137: ("a program used an NVLink address that it may not", "IGNORE"),
    141: ("CUDA fast path error", "IGNORE"),
    **dict.fromkeys(
        range(144, 151),
        ("NVLink error, grave or not by its parts; what recovers the GPU is read from NVML", "WORKFLOW_NVLINK5_ERR"),
    ),
    154: ("the driver's word for what recovers the GPU has changed; that is read from NVML", "XID_154"),
    155: ("an NVLink went down, perhaps on purpose; what recovers the GPU is read from NVML", "RESET_GPU"),
    157: ("a part of the GPU could not be retired, for there is no spare one", "IGNORE"),
    160: ("a memory channel was retired", "IGNORE"),
    161: ("a memory channel could not be retired", "IGNORE"),
}
_RESTARTING_XIDS = {
    32: ("corrupted push buffer stream, as of a bad PCI Express link; hardly ever the program's own doing",
         "RESTART_APP"),
    94: ("uncorrectable memory error, contained: only the program that used the memory is hit", "RESTART_APP"),
}  # fmt: skip
_RESET_XIDS = {
    46: ("GPU stopped processing and did not time out in order", "RESET_GPU"),
    48: ("double-bit ECC error", "WORKFLOW_XID_48, cleared by a reset"),
    61: ("the GPU's own microcontroller has halted (breakpoint)",
         "unused since Ampere; before, a reset by the GPU Debug Guidelines"),
    62: ("the GPU's own microcontroller has halted", "RESET_GPU"),
    64: ("a page could not be retired or a row not be remapped", "RESET_GPU"),
    74: ("NVLink error", "WORKFLOW_NVLINK_ERR, cleared by a reset"),
    95: ("uncorrectable memory error, not contained: any program on the GPU may be hit", "RESET_GPU"),
    109: ("a context switch did not come to an end", "RESET_GPU"),
    110: ("security fault, mostly of the hardware", "RESET_GPU"),
    119: ("the GPU's system processor does not answer the driver", "RESET_GPU"),
    120: ("the GPU's system processor has failed", "RESET_GPU"),
    136: ("the training of an NVLink failed", "RESET_GPU"),
    140: ("ECC error that could not be recovered from", "RESET_GPU"),
    143: ("the GPU could not be started", "RESET_GPU"),
    156: ("a part of the GPU is retired at the next reset", "RESET_GPU"),
    158: ("the GPU did not answer in time, for good", "RESET_GPU"),
}  # fmt: skip
_REBOOT_XIDS = {
    54: ("the GPU board's own power cable is not connected", "CHECK_MECHANICALS"),
    79: ("the GPU has fallen off the bus", "RESTART_BM"),
    151: ("the keys of confidential computing could not be changed", "RESTART_VM"),
}
GPU_RULES = (
    Rule("gpu_lost", "gpu_lost", "NVML says that the GPU is lost: it has fallen off the bus, or must be reset",
         HealthAction.QUARANTINE, Recovery.RESET, source=NVML_REFERENCE),
    Rule("gpu_unreadable", "nvml", "NVML answers, but not for this GPU", HealthAction.HOLD, after_seconds=10.0,
         source=OWN),
    Rule("nvml_silent", "nvml", "NVML does not answer: nobody knows how the GPUs are", HealthAction.HOLD),
    Rule("ecc_double_bit", "ecc", "NVML told of an ECC error that could not be corrected", HealthAction.QUARANTINE,
         Recovery.RESET, event=True, source=NVML_REFERENCE),
    Rule("recovery_reset", "recovery", "the driver says that the GPU must be reset", HealthAction.QUARANTINE,
         source=NVML_REFERENCE),
    Rule("recovery_reboot", "recovery", "the driver says that the machine must be rebooted for this GPU",
         HealthAction.QUARANTINE, source=NVML_REFERENCE),
    Rule("recovery_drain", "recovery", "the driver says that traffic between GPUs must be drained", HealthAction.HOLD,
         source=NVML_REFERENCE),
    Rule("remap_failed", "memory_rows", "a row of its memory could not be remapped: the GPU is to be replaced",
         HealthAction.QUARANTINE, source=ROW_REMAPPING),
    Rule("remap_pending", "memory_rows", "rows of its memory are remapped at the next reset", HealthAction.HOLD,
         source=ROW_REMAPPING),
    Rule("retirement_pending", "memory_rows", "pages of its memory are retired when the driver is next loaded",
         HealthAction.HOLD, source=PAGE_RETIREMENT),
    Rule("hardware_slowdown", "slowdown", "the hardware holds its clocks down: power brake, or much too hot",
         HealthAction.HOLD, after_seconds=MINUTE_SECONDS, calm_seconds=2 * MINUTE_SECONDS, source=NVML_REFERENCE),
    Rule("thermal_slowdown", "slowdown", "its clocks have been held down for heat for a long time",
         HealthAction.IGNORE, after_seconds=5 * MINUTE_SECONDS, calm_seconds=5 * MINUTE_SECONDS,
         source=NVML_REFERENCE),
    Rule("foreign_process", "gpu_busy", "somebody whom we have not started holds it", HealthAction.QUARANTINE,
         after_seconds=8.0),
    Rule("foreign_process_beside", "gpu_busy", "somebody whom we have not started is on it beside a job of ours",
         HealthAction.HOLD, after_seconds=8.0),
)  # fmt: skip
NODE_RULES = (
    Rule("disk_low", "disk", "too little disk is left for what must be written down", HealthAction.HOLD,
         calm_seconds=30.0),
    Rule("disk_refuses", "disk", "the agent's directory cannot be written: no job's end could be kept",
         HealthAction.DRAIN, after_seconds=30.0, calm_seconds=CALM_SECONDS),
    Rule("memory_low", "memory", "hardly any memory is available: the kernel may soon kill somebody",
         HealthAction.HOLD, after_seconds=10.0, calm_seconds=CALM_SECONDS),
    Rule("memory_stall", "memory", "everybody waits for memory much of the time", HealthAction.HOLD,
         after_seconds=30.0, calm_seconds=CALM_SECONDS),
    Rule("descriptors_low", "descriptors", "the agent has hardly any file descriptors left: it can launch nothing",
         HealthAction.HOLD, calm_seconds=5.0),
    Rule("processes_low", "processes", "the agent can start no process: it can launch nothing", HealthAction.HOLD,
         calm_seconds=5.0),
    Rule("memory_refused", "memory", "the agent can allocate no memory: it can launch nothing", HealthAction.HOLD,
         calm_seconds=30.0),
    Rule("overload", "load", "many times more threads want to run than there are CPUs", HealthAction.HOLD,
         after_seconds=2 * MINUTE_SECONDS, calm_seconds=CALM_SECONDS),
)  # fmt: skip
UNKNOWN_XID = _xid(0, "an XID that the table does not know", "", HealthAction.IGNORE)

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *(_xid(number, *told, HealthAction.IGNORE) for number, told in _IGNORED_XIDS.items()),
        *(_xid(number, *told, HealthAction.RESTART) for number, told in _RESTARTING_XIDS.items()),
        *(_xid(number, *told, HealthAction.QUARANTINE, Recovery.RESET) for number, told in _RESET_XIDS.items()),
        *(_xid(number, *told, HealthAction.QUARANTINE, Recovery.REBOOT) for number, told in _REBOOT_XIDS.items()),
        UNKNOWN_XID,
        *GPU_RULES,
        *NODE_RULES,
    )
}


def xid_rule(number: int) -> Rule:
    """What the table says of an XID.

    >>> xid_rule(79).action.value, xid_rule(31).action.value, xid_rule(9999).name
    ('quarantine', 'ignore', 'xid_0')
    """
    return RULES.get(f"xid_{number}", UNKNOWN_XID)
