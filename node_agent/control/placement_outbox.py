"""What placement is to be told with the next message: reports, answers, progress and the node's inventory."""

from __future__ import annotations

import asyncio

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.v1 import resources_pb2

ANSWERS_MAX = 1000  # kept without a connection


class PlacementOutbox:
    """Everything that waits to be sent. `filled` is set whenever something was added."""

    def __init__(self) -> None:
        self._message = agent_pb2.ConnectRequest()
        self._progress: dict[AttemptKey, agent_pb2.ProgressReport] = {}
        self.filled = asyncio.Event()
        self.said_goodbye = False

    def report(self, report: agent_pb2.AttemptReport) -> None:
        """Queue an attempt's report; all reports are sent, in order."""
        self._message.reports.append(report)
        self.filled.set()

    def report_resize(self, report: agent_pb2.ResizeReport) -> None:
        """Queue the answer to a resize; it survives a reconnect."""
        self._message.resized.append(report)
        self.filled.set()

    def report_profile(self, report: agent_pb2.ProfileReport) -> None:
        """Queue a result of a profile; it survives a reconnect."""
        self._message.profiled.append(report)
        self.filled.set()

    def report_progress(self, report: agent_pb2.ProgressReport) -> None:
        """Queue a job's progress; only the latest is sent."""
        self._progress[AttemptKey(report.job_id, report.number)] = report
        self.filled.set()

    def report_inventory(self, inventory: resources_pb2.Inventory) -> None:
        """Queue the node's changed inventory."""
        self._message.inventory.CopyFrom(inventory)
        self.filled.set()

    def say_goodbye(self, reason: str) -> None:
        """Queue the node's goodbye, after everything else."""
        self._message.goodbye.reason = reason
        self.said_goodbye = True
        self.filled.set()

    def __bool__(self) -> bool:
        """Return whether anything but progress waits."""
        return bool(self._message.ByteSize())

    def take(self) -> agent_pb2.ConnectRequest:
        """Return everything that waits as one message."""
        message, self._message = self._message, agent_pb2.ConnectRequest()
        message.progress.extend(self._progress.values())
        self._progress.clear()
        return message

    def keep_answers(self) -> None:
        """Drop what the hello of a new stream reports anyway; answers to resizes and profiles are not part of it."""
        self._message = agent_pb2.ConnectRequest(
            resized=self._message.resized[-ANSWERS_MAX:], profiled=self._message.profiled[-ANSWERS_MAX:]
        )
        self._progress.clear()
