"""Asks the contention policy what to do. It is a stranger's code: what it does wrong is named and does no harm.

A directive is a lease to the agent, and a policy speaks only when it wants something else; so what was said last of an
attempt that is held back is said again with each window. What nobody here has said (contention was restarted) is said
again too, but only for a while: a policy that knows how to take it up will have spoken by then.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from cotenant.core.policy.protocols import AttemptWindow, ContentionPolicy, Directive, NodeWindow, Throttle
from cotenant.services.contention.incidents.incident_log import Attempt, Incidents, holds_back
from cotenant.services.contention.incidents.migration_requests import Moves
from cotenant.v1 import contention_service_pb2 as pb

log = structlog.get_logger()

INHERITED_SECONDS_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What was said last of an attempt that is held back, and until when that is said again."""

    message: pb.Directive
    until: float


class Judge:
    """Turns windows into directives, and remembers the incidents.

    A policy that fails on a node is named once, when it begins to, and once when it is well again: it is asked every
    few seconds about each of thousands of nodes.
    """

    def __init__(self, policy: ContentionPolicy, incidents: Incidents, moves: Moves) -> None:
        self._policy, self._incidents, self._moves = policy, incidents, moves
        self._failures: Counter[str] = Counter()
        self._standing: dict[str, dict[Attempt, Standing]] = {}  # by node

    def judge(self, window: NodeWindow) -> Sequence[pb.Directive]:
        """Say what the agent of a node should do now, and what it should go on with."""
        directives = self._ask(window)
        self._incidents.note(window, directives)
        for directive in directives:
            if directive.move:
                self._moves.want(window.node_id, (directive.job_id, directive.number), directive.reason)
        self._moves.see(window)
        fresh = {(one.job_id, one.number): (one, _message(one)) for one in directives}
        standing = self._stand(window, fresh)
        return [message for _, message in fresh.values()] + [
            one.message for attempt, one in standing.items() if attempt not in fresh
        ]

    def _ask(self, window: NodeWindow) -> Sequence[Directive]:
        """Ask the policy; what makes no sense is left out."""
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
        return sound

    def _stand(
        self, window: NodeWindow, fresh: dict[Attempt, tuple[Directive, pb.Directive]]
    ) -> dict[Attempt, Standing]:
        """Keep what holds from now on: what was said now, else what was said last, else what the agent tells."""
        before, now = self._standing.pop(window.node_id, {}), {}
        for at in window.attempts:
            attempt = at.job_id, at.number
            if attempt in fresh:
                directive, message = fresh[attempt]
                if holds_back(directive):
                    now[attempt] = Standing(message, float("inf"))
            elif attempt in before:
                if window.now < before[attempt].until:
                    now[attempt] = before[attempt]
            elif not at.throttle.free and not self._incidents.is_open(window.node_id, attempt):
                self._incidents.inherit(window, at)
                now[attempt] = Standing(_inherited(at), window.now + INHERITED_SECONDS_MAX)
        if now:
            self._standing[window.node_id] = now
        return now

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
    if directive.throttle is not None and not _possible(directive.throttle):
        return f"a directive for job {directive.job_id} has a throttle that cannot be: {directive.throttle}"
    if not any((at.job_id, at.number) == (directive.job_id, directive.number) for at in window.attempts):
        return f"a directive is for job {directive.job_id}, attempt {directive.number}, which is not on the node"
    return ""


def _possible(throttle: Throttle) -> bool:
    return 1 <= throttle.bandwidth_percent <= 100 and throttle.cores >= 0


def _message(directive: Directive) -> pb.Directive:
    return pb.Directive(
        id=uuid.uuid4().hex,
        job_id=directive.job_id,
        number=directive.number,
        share=directive.share,
        reason=directive.reason,
        throttle=None if directive.throttle is None else throttle_message(directive.throttle),
    )


def _inherited(at: AttemptWindow) -> pb.Directive:
    """What somebody before us must have said of an attempt."""
    return pb.Directive(
        id=uuid.uuid4().hex,
        job_id=at.job_id,
        number=at.number,
        share=0.0 if at.throttle.suspended else 0.5,
        reason="it was held back when contention began to look",
        throttle=throttle_message(at.throttle),
    )


def throttle_message(throttle: Throttle) -> pb.Throttle:
    """Write a throttle for the wire."""
    return pb.Throttle(
        bandwidth_percent=throttle.bandwidth_percent,
        cores=throttle.cores,
        idle=throttle.idle,
        suspended=throttle.suspended,
    )
