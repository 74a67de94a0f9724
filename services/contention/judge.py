"""Asks the contention policy what to do. It is a stranger's code: what it does wrong is named and does no harm."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence

import structlog

from cotenant.core.policy import ContentionPolicy, Directive, NodeWindow
from cotenant.services.contention.incidents import Incidents
from cotenant.v1 import contention_service_pb2 as pb

log = structlog.get_logger()


class Judge:
    """Turns windows into directives, and remembers the incidents.

    A policy that fails on a node is named once, when it begins to, and once when it is well again: it is asked every
    few seconds about each of thousands of nodes.
    """

    def __init__(self, policy: ContentionPolicy, incidents: Incidents) -> None:
        self._policy, self._incidents = policy, incidents
        self._failures: Counter[str] = Counter()

    def judge(self, window: NodeWindow) -> Sequence[pb.Directive]:
        """Say what the agent of a node should do now."""
        try:
            directives = tuple(self._policy.judge(window))
            sound = [directive for directive in directives if not _wrong(directive, window)]
        except Exception as error:  # whatever a stranger's policy does
            self._failed(window.node_id, f"{type(error).__name__}: {error}")
            return ()
        if wrong := next(filter(None, (_wrong(directive, window) for directive in directives)), ""):
            self._failed(window.node_id, wrong)
        else:
            self._succeeded(window.node_id)
        self._incidents.note(window, sound)
        return [_message(directive) for directive in sound]

    def forget(self, node_id: str) -> None:
        """Let go of a node whose agent is gone."""
        self._failures.pop(node_id, None)

    def _failed(self, node_id: str, error: str) -> None:
        self._failures[node_id] += 1
        if self._failures[node_id] == 1:
            log.error("contention_policy_failed", policy=self._policy.name, node=node_id, error=error)

    def _succeeded(self, node_id: str) -> None:
        if failures := self._failures.pop(node_id, 0):
            log.info("contention_policy_recovered", policy=self._policy.name, node=node_id, failures=failures)


def _wrong(directive: Directive, window: NodeWindow) -> str:
    """Say why a directive cannot be followed, or nothing."""
    if not 0 <= directive.share <= 1:
        return f"a directive gives a share of {directive.share}, not from 0 to 1"
    if not any((at.job_id, at.number) == (directive.job_id, directive.number) for at in window.attempts):
        return f"a directive is for job {directive.job_id}, attempt {directive.number}, which is not on the node"
    return ""


def _message(directive: Directive) -> pb.Directive:
    return pb.Directive(
        id=uuid.uuid4().hex,
        job_id=directive.job_id,
        number=directive.number,
        share=directive.share,
        reason=directive.reason,
    )
