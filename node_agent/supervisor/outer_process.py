"""The process whose end is the end of the outer job, if the agent runs in a job of another system.

An attempt outlives its agent, but not the outer job: its supervisor watches this process. It is needed where the other
system finds a job's processes by parentage: after the end of an agent, a supervisor is nobody's child.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.process_table import open_process
else:
    from process_table import open_process

REASON = "DRAINED"
SETTLE_MILLISECONDS = 100  # between a task's end and the signal that the other system sends to all processes
NONE = -1


class OuterProcess:
    """The watched process of an attempt's spec. `descriptor` becomes readable when it ends; `NONE`: not watched."""

    def __init__(self, spec: object) -> None:
        known = spec if isinstance(spec, dict) else {}
        self.nested, self.name = bool(known), str(known.get("name", ""))
        self.gone = False  # before this supervisor could watch it
        self.descriptor = NONE
        pid, ticks = known.get("pid"), known.get("start_ticks")
        if isinstance(pid, int) and isinstance(ticks, int):
            self.descriptor = open_process(pid, ticks) or NONE
            self.gone = self.descriptor == NONE

    @property
    def message(self) -> str:
        """Why an attempt is stopped with it."""
        return f"{self.name} ended"

    def close(self) -> None:
        """Stop watching."""
        if self.descriptor != NONE:
            os.close(self.descriptor)
            self.descriptor = NONE
