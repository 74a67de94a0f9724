"""The table of problems that a node or a GPU may have, their consequences, and how each recovers.

The meanings of XIDs are NVIDIA's: "Analyzing Xid Errors with the Xid Catalog" in the documentation for GPU deployment
(docs.nvidia.com/deploy/xid-errors); each row names its bucket for the immediate action. Buckets become actions:
RESET_GPU is a quarantine until a reset; RESTART_BM, RESTART_VM and CHECK_MECHANICALS a quarantine until a reboot;
RESTART_APP a restart where the program did not cause the error. XIDs that usually report a program's own error (13, 31,
43, 45, 68 and similar) are ignored: the program ends by itself, and its failure is classified by its exit. Where the
severity of an XID depends on parts that the event does not contain, NVML's recovery action for the GPU counts. An XID
that the table does not know is reported and has no other consequence: NVML's readings then decide about the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cotenant.core.model.node import HealthAction

TABLE_VERSION = 4  # raised when the consequence of any rule changes
MINUTE_SECONDS, HOUR_SECONDS = 60.0, 3600.0
CALM_SECONDS = 45.0  # a node is back within a minute of its recovery, with a look every few seconds
XID_CATALOG = "NVIDIA, Xid Catalog"
PAGE_RETIREMENT = "NVIDIA, Dynamic Page Retirement"
ROW_REMAPPING = "NVIDIA, GPU Memory Error Management"
NVML_REFERENCE = "NVIDIA, NVML API Reference"
OWN = "ours"
OUTER_JOB = "outer_job"


class Recovery(StrEnum):
    """What clears a finding. An operator's release clears any; a condition that persists is found again."""

    CALM = "calm"  # by itself, after it has not been seen for some time
    RESET = "reset"  # a driver reload or a reboot
    REBOOT = "reboot"  # a reboot
    RELEASE = "release"  # only an operator


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of problem.

    It takes effect once it has lasted for `after_seconds`. If it recovers by calm, it clears when it has not been seen
    for `calm_seconds`. An `event` is seen once, everything else as long as the condition lasts.
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
        """What clears it, in one sentence."""
        match self.recovery:
            case Recovery.CALM if self.calm_seconds:
                return f"clears once it has not been seen for {_span(self.calm_seconds)}"
            case Recovery.CALM:
                return "clears as soon as the condition ends"
            case Recovery.RESET:
                return "reload the driver or reboot; or reset the GPU and release it"
            case Recovery.REBOOT:
                return "reboot the machine, or release the GPU"
        return "release the GPU once it has been repaired"


def _span(seconds: float) -> str:
    return f"{seconds / MINUTE_SECONDS:g} min" if seconds >= MINUTE_SECONDS else f"{seconds:g} s"


def _xid(number: int, meaning: str, bucket: str, action: HealthAction, recovery: Recovery = Recovery.CALM) -> Rule:
    calm_seconds = HOUR_SECONDS if recovery is Recovery.CALM else 0.0
    source = f"{XID_CATALOG}: {bucket}" if bucket else OWN
    return Rule(f"xid_{number}", "xid", meaning, action, recovery, calm_seconds=calm_seconds, event=True,
                source=source)  # fmt: skip


# Each with NVIDIA's bucket for the immediate action.
_IGNORED_XIDS = {
    8: ("GPU stopped processing: a channel timed out", "RESTART_APP"),
    11: ("invalid or corrupted push buffer stream", "RESTART_APP"),
    13: ("graphics engine exception, such as an out-of-bounds access", "RESTART_APP"),
    25: ("invalid or illegal push buffer stream", "RESTART_APP"),
    31: ("GPU memory page fault, such as an illegal address", "RESTART_APP"),
    43: ("the program caused a fault and its channel was reset", "IGNORE"),
    44: ("graphics engine fault during a context switch", "IGNORE"),
    45: ("preemptive cleanup after the program ended or after an earlier error", "WORKFLOW_XID_45, by another XID"),
    63: ("a page was retired or a row marked for remapping; pending ones are read from NVML", "IGNORE"),
    66: ("illegal access by the driver", "IGNORE"),
    67: ("illegal access by the driver", "IGNORE"),
    68: ("video decoder exception", "RESTART_APP"),
    69: ("graphics engine class error", "RESTART_APP"),
    92: ("many single-bit ECC errors, all corrected", "IGNORE"),
    121: ("corrected error on the link to the CPU", "IGNORE"),
    137: ("a program used an illegal NVLink address", "IGNORE"),
    141: ("CUDA fast path error", "IGNORE"),
    **dict.fromkeys(
        range(144, 151),
        (
            "NVLink error, severe or not depending on its parts; the recovery action is read from NVML",
            "WORKFLOW_NVLINK5_ERR",
        ),
    ),
    154: ("the driver's recovery action for the GPU has changed; it is read from NVML", "XID_154"),
    155: ("an NVLink went down, perhaps on purpose; the recovery action is read from NVML", "RESET_GPU"),
    157: ("a part of the GPU could not be retired: there is no spare", "IGNORE"),
    160: ("a memory channel was retired", "IGNORE"),
    161: ("a memory channel could not be retired", "IGNORE"),
}
_RESTARTING_XIDS = {
    32: ("corrupted push buffer stream, such as from a bad PCI Express link; rarely caused by the program",
         "RESTART_APP"),
    94: ("uncorrectable memory error, contained: affects only the program that used the memory", "RESTART_APP"),
}  # fmt: skip
_RESET_XIDS = {
    46: ("GPU stopped processing and did not time out properly", "RESET_GPU"),
    48: ("double-bit ECC error", "WORKFLOW_XID_48, cleared by a reset"),
    61: ("the GPU's own microcontroller has halted (breakpoint)",
         "unused since Ampere; before, a reset by the GPU Debug Guidelines"),
    62: ("the GPU's own microcontroller has halted", "RESET_GPU"),
    64: ("a page could not be retired or a row could not be remapped", "RESET_GPU"),
    74: ("NVLink error", "WORKFLOW_NVLINK_ERR, cleared by a reset"),
    95: ("uncorrectable memory error, not contained: may affect any program on the GPU", "RESET_GPU"),
    109: ("a context switch did not complete", "RESET_GPU"),
    110: ("security fault, usually of the hardware", "RESET_GPU"),
    119: ("the GPU's system processor does not respond to the driver", "RESET_GPU"),
    120: ("the GPU's system processor has failed", "RESET_GPU"),
    136: ("the training of an NVLink failed", "RESET_GPU"),
    140: ("unrecoverable ECC error", "RESET_GPU"),
    143: ("the GPU could not be initialized", "RESET_GPU"),
    156: ("a part of the GPU is retired at the next reset", "RESET_GPU"),
    158: ("the GPU permanently stopped responding in time", "RESET_GPU"),
}  # fmt: skip
_REBOOT_XIDS = {
    54: ("the GPU board's own power cable is not connected", "CHECK_MECHANICALS"),
    79: ("the GPU has fallen off the bus", "RESTART_BM"),
    151: ("the confidential computing keys could not be rotated", "RESTART_VM"),
}
GPU_RULES = (
    Rule("gpu_lost", "gpu_lost", "NVML reports the GPU as lost: it has fallen off the bus, or must be reset",
         HealthAction.QUARANTINE, Recovery.RESET, source=NVML_REFERENCE),
    Rule("gpu_unreadable", "nvml", "NVML answers, but not for this GPU", HealthAction.HOLD, after_seconds=10.0,
         source=OWN),
    Rule("nvml_silent", "nvml", "NVML does not answer: the state of the GPUs is unknown", HealthAction.HOLD),
    Rule("ecc_double_bit", "ecc", "NVML reported an uncorrectable ECC error", HealthAction.QUARANTINE,
         Recovery.RESET, event=True, source=NVML_REFERENCE),
    Rule("recovery_reset", "recovery", "the driver reports that the GPU must be reset", HealthAction.QUARANTINE,
         source=NVML_REFERENCE),
    Rule("recovery_reboot", "recovery", "the driver reports that the machine must be rebooted for this GPU",
         HealthAction.QUARANTINE, source=NVML_REFERENCE),
    Rule("recovery_drain", "recovery", "the driver reports that traffic between GPUs must be drained",
         HealthAction.HOLD, source=NVML_REFERENCE),
    Rule("remap_failed", "memory_rows", "a row of its memory could not be remapped: replace the GPU",
         HealthAction.QUARANTINE, source=ROW_REMAPPING),
    Rule("remap_pending", "memory_rows", "rows of its memory will be remapped at the next reset", HealthAction.HOLD,
         source=ROW_REMAPPING),
    Rule("retirement_pending", "memory_rows", "pages of its memory will be retired when the driver is next loaded",
         HealthAction.HOLD, source=PAGE_RETIREMENT),
    Rule("hardware_slowdown", "slowdown", "the hardware throttles its clocks: power brake, or much too hot",
         HealthAction.HOLD, after_seconds=MINUTE_SECONDS, calm_seconds=2 * MINUTE_SECONDS, source=NVML_REFERENCE),
    Rule("thermal_slowdown", "slowdown", "its clocks have been throttled because of heat for a long time",
         HealthAction.IGNORE, after_seconds=5 * MINUTE_SECONDS, calm_seconds=5 * MINUTE_SECONDS,
         source=NVML_REFERENCE),
    Rule("foreign_process", "gpu_busy", "a process that we did not start holds it", HealthAction.QUARANTINE,
         after_seconds=8.0),
    Rule("foreign_process_beside", "gpu_busy", "a process that we did not start shares it with a job of ours",
         HealthAction.HOLD, after_seconds=8.0),
)  # fmt: skip
NODE_RULES = (
    Rule("disk_low", "disk", "too little disk space is left for records that must be written", HealthAction.HOLD,
         calm_seconds=30.0),
    Rule("disk_refuses", "disk", "the agent's directory cannot be written: ends of jobs could not be recorded",
         HealthAction.DRAIN, after_seconds=30.0, calm_seconds=CALM_SECONDS),
    Rule("memory_low", "memory", "hardly any memory is available: the kernel may soon kill a process",
         HealthAction.HOLD, after_seconds=10.0, calm_seconds=CALM_SECONDS),
    Rule("memory_stall", "memory", "all tasks wait for memory much of the time", HealthAction.HOLD,
         after_seconds=30.0, calm_seconds=CALM_SECONDS),
    Rule("descriptors_low", "descriptors", "the agent has hardly any file descriptors left: it cannot launch jobs",
         HealthAction.HOLD, calm_seconds=5.0),
    Rule("processes_low", "processes", "the agent cannot start processes: it cannot launch jobs", HealthAction.HOLD,
         calm_seconds=5.0),
    Rule("memory_refused", "memory", "the agent cannot allocate memory: it cannot launch jobs", HealthAction.HOLD,
         calm_seconds=30.0),
    Rule(OUTER_JOB, OUTER_JOB, "the job of another system that the agent runs in ends", HealthAction.DRAIN),
    Rule("overload", "load", "many times more runnable threads than CPUs", HealthAction.HOLD,
         after_seconds=2 * MINUTE_SECONDS, calm_seconds=CALM_SECONDS),
)  # fmt: skip
UNKNOWN_XID = _xid(0, "an XID that the table does not know", "", HealthAction.IGNORE)

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *(_xid(number, *row, HealthAction.IGNORE) for number, row in _IGNORED_XIDS.items()),
        *(_xid(number, *row, HealthAction.RESTART) for number, row in _RESTARTING_XIDS.items()),
        *(_xid(number, *row, HealthAction.QUARANTINE, Recovery.RESET) for number, row in _RESET_XIDS.items()),
        *(_xid(number, *row, HealthAction.QUARANTINE, Recovery.REBOOT) for number, row in _REBOOT_XIDS.items()),
        UNKNOWN_XID,
        *GPU_RULES,
        *NODE_RULES,
    )
}


def xid_rule(number: int) -> Rule:
    """Return the rule for an XID.

    >>> xid_rule(79).action.value, xid_rule(31).action.value, xid_rule(9999).name
    ('quarantine', 'ignore', 'xid_0')
    """
    return RULES.get(f"xid_{number}", UNKNOWN_XID)
