"""Limits throttled attempts to a share of the node's memory bandwidth, where the hardware can (see `resctrl`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotenant.core.model.throttle import FREE
from cotenant.node_agent.enforcement.hook import EnforcedNode, EnforcementHook, ThrottleChange
from cotenant.node_agent.enforcement.resctrl import BandwidthRefused, Resctrl


class BandwidthShare(EnforcementHook):
    """Limits and releases the memory bandwidth of attempts. What is not throttled has no limit."""

    def __init__(self, resctrl: Resctrl | None = None) -> None:
        self._resctrl = resctrl

    def open(self, node: EnforcedNode) -> Sequence[str]:
        """Open the kernel's file system. A node without it reports so when it is to throttle an attempt."""
        self._resctrl = Resctrl.open()
        return ()

    def throttle(self, change: ThrottleChange) -> None:
        """Limit the attempt to the wanted share."""
        percent = change.wanted.bandwidth_percent
        if percent == change.now.bandwidth_percent and not change.uncertain:
            return
        try:
            change.now = replace(change.now, bandwidth_percent=self._limit(change, percent))
        except BandwidthRefused as error:
            change.refused.append(str(error))

    def _limit(self, change: ThrottleChange, percent: int) -> int:
        if self._resctrl is not None:
            return self._resctrl.throttle(change.attempt.name, percent, change.attempt.threads)
        if percent < FREE.bandwidth_percent:
            change.refused.append("this machine cannot limit its memory bandwidth")
        return FREE.bandwidth_percent

    def end(self, attempt: str) -> None:
        """Remove the attempt's groups, which are outside of its control group."""
        if self._resctrl is not None:
            self._resctrl.forget(attempt)
