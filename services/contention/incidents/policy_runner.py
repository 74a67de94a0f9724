"""Runs the contention policy. Policies are third-party code: their failures are logged and do no harm.

A directive is a lease to the agent, and a policy returns one only to change something; so the last directive of a
throttled attempt is repeated with each window. Throttles from before a restart of contention are repeated too, but only
for a while: a policy that handles them will have sent its own directive by then.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from cotenant.agent.v1 import sample_service_pb2 as sample
from cotenant.core.policy.protocols import AttemptWindow, ContentionPolicy, Directive, NodeWindow, Throttle
from cotenant.services.contention.incidents.incident_log import Attempt, IncidentLog, throttles
from cotenant.services.contention.incidents.migration_requests import MigrationRequests
from cotenant.v1 import contention_service_pb2 as pb

log = structlog.get_logger()

INHERITED_SECONDS_MAX = 300.0


@dataclass(frozen=True, slots=True)
class ActiveDirective:
    """The last directive of a throttled attempt, and until when it is repeated."""

    message: sample.Directive
    until: float


class PolicyRunner:
    """Turns windows into directives, and records incidents.

    A policy that fails on a node is logged once when it starts to fail and once when it recovers, because it runs every
    few seconds for each of thousands of nodes.
    """

    def __init__(self, policy: ContentionPolicy, incidents: IncidentLog, migrations: MigrationRequests) -> None:
        self._policy, self._incidents, self._migrations = policy, incidents, migrations
        self._failures: Counter[str] = Counter()
        self._active: dict[str, dict[Attempt, ActiveDirective]] = {}  # by node

    def run(self, window: NodeWindow) -> Sequence[sample.Directive]:
        """Return the directives for a node's agent: new ones, and the repeated ones of throttled attempts."""
        directives = self._ask(window)
        self._incidents.record(window, directives)
        for directive in directives:
            if directive.move:
                self._migrations.add(window.node_id, (directive.job_id, directive.number), directive.reason)
        self._migrations.send_pending(window)
        fresh = {(one.job_id, one.number): (one, _message(one)) for one in directives}
        standing = self._update_active(window, fresh)
        return [message for _, message in fresh.values()] + [
            one.message for attempt, one in standing.items() if attempt not in fresh
        ]

    def _ask(self, window: NodeWindow) -> Sequence[Directive]:
        """Return the policy's valid directives."""
        try:
            directives = tuple(self._policy.judge(window))
            valid = [directive for directive in directives if not _invalid_reason(directive, window)]
        except Exception as error:  # a policy may raise anything
            self._failed(window.node_id, f"{type(error).__name__}: {error}")
            return ()
        if reason := next(filter(None, (_invalid_reason(directive, window) for directive in directives)), ""):
            self._failed(window.node_id, reason)
        else:
            self._succeeded(window.node_id)
        return valid

    def _update_active(
        self, window: NodeWindow, fresh: dict[Attempt, tuple[Directive, sample.Directive]]
    ) -> dict[Attempt, ActiveDirective]:
        """Update the directives to repeat: the new ones, else the last ones, else the reported throttles."""
        before, now = self._active.pop(window.node_id, {}), {}
        for at in window.attempts:
            attempt = at.job_id, at.number
            if attempt in fresh:
                directive, message = fresh[attempt]
                if throttles(directive):
                    now[attempt] = ActiveDirective(message, float("inf"))
            elif attempt in before:
                if window.now < before[attempt].until:
                    now[attempt] = before[attempt]
            elif not at.throttle.free and not self._incidents.is_open(window.node_id, attempt):
                self._incidents.inherit(window, at)
                now[attempt] = ActiveDirective(_inherited(at), window.now + INHERITED_SECONDS_MAX)
        if now:
            self._active[window.node_id] = now
        return now

    def forget(self, node_id: str) -> None:
        """Drop the failure count of a node whose agent is gone."""
        self._failures.pop(node_id, None)

    def _failed(self, node_id: str, error: str) -> None:
        self._failures[node_id] += 1
        if self._failures[node_id] == 1:
            log.error("contention_policy_failed", policy=self._policy.name, node=node_id, error=error)

    def _succeeded(self, node_id: str) -> None:
        if failures := self._failures.pop(node_id, 0):
            log.info("contention_policy_recovered", policy=self._policy.name, node=node_id, failures=failures)


def _invalid_reason(directive: Directive, window: NodeWindow) -> str:
    """Return why a directive is invalid, or ""."""
    if not 0 <= directive.share <= 1:
        return f"a directive has the share {directive.share}; it must be from 0 to 1"
    if directive.throttle is not None and not _throttle_valid(directive.throttle):
        return f"a directive for job {directive.job_id} has an invalid throttle: {directive.throttle}"
    if not any((at.job_id, at.number) == (directive.job_id, directive.number) for at in window.attempts):
        return f"a directive is for job {directive.job_id}, attempt {directive.number}, which is not on the node"
    return ""


def _throttle_valid(throttle: Throttle) -> bool:
    return 1 <= throttle.bandwidth_percent <= 100 and throttle.cores >= 0


def _message(directive: Directive) -> sample.Directive:
    return sample.Directive(
        id=uuid.uuid4().hex,
        job_id=directive.job_id,
        number=directive.number,
        share=directive.share,
        reason=directive.reason,
        throttle=None if directive.throttle is None else throttle_message(directive.throttle),
    )


def _inherited(at: AttemptWindow) -> sample.Directive:
    """Return the directive that an attempt's present throttle must have come from."""
    return sample.Directive(
        id=uuid.uuid4().hex,
        job_id=at.job_id,
        number=at.number,
        share=0.0 if at.throttle.suspended else 0.5,
        reason="it was throttled before contention started",
        throttle=throttle_message(at.throttle),
    )


def throttle_message(throttle: Throttle) -> pb.Throttle:
    """Return the message of a throttle."""
    return pb.Throttle(
        bandwidth_percent=throttle.bandwidth_percent,
        cores=throttle.cores,
        idle=throttle.idle,
        suspended=throttle.suspended,
    )
