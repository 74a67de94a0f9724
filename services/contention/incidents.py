"""What became of contention: one incident from the first throttling of an attempt until it is free again.

They are kept in memory, a bounded number of them. The policy's directives name whom they throttle and why; whom it
hurt, and by how much, is theirs to say in the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.policy import Directive, NodeWindow
from cotenant.rpc.pages import page_of
from cotenant.v1 import contention_service_pb2 as pb

INCIDENTS_MAX = 1_000
ACTIONS_MAX = 100  # of one incident; the last ones are kept

Attempt = tuple[str, int]  # job, number


class Incidents:
    """The newest incidents, open and closed."""

    def __init__(self, incidents_max: int = INCIDENTS_MAX) -> None:
        self._incidents_max = incidents_max
        self._by_id: dict[str, pb.Incident] = {}  # in the order of their ids, which is that of their start
        self._open: dict[str, dict[Attempt, pb.Incident]] = {}  # by node
        self._made = 0

    def note(self, window: NodeWindow, directives: Sequence[Directive]) -> None:
        """Open, continue and close the incidents of a node by what its policy says now."""
        still_open = self._open.pop(window.node_id, {})
        for directive in directives:
            attempt = directive.job_id, directive.number
            if directive.share < 1 and attempt not in still_open:
                still_open[attempt] = self._begin(window, directive)
            if attempt in still_open:
                _act(still_open[attempt], directive)
            if directive.share >= 1:
                _end(still_open.pop(attempt, None), window)
        present = {(attempt.job_id, attempt.number) for attempt in window.attempts}
        for attempt in still_open.keys() - present:  # what left the node hurts nobody there any more
            _end(still_open.pop(attempt), window)
        if still_open:
            self._open[window.node_id] = still_open

    def page(self, node_id: str, size: int, token: str) -> pb.ListIncidentsResponse:
        """List incidents, of one node or of all, newest first."""
        ids = [id for id, incident in self._by_id.items() if node_id in ("", incident.node_id)]
        page, next_token = page_of(ids, size, token, descending=True, scope=f"incidents {node_id}")
        return pb.ListIncidentsResponse(incidents=[self._by_id[id] for id in page], next_page_token=next_token)

    def _begin(self, window: NodeWindow, directive: Directive) -> pb.Incident:
        self._made += 1
        incident = pb.Incident(id=f"{self._made:012d}", node_id=window.node_id, suspect_job_id=directive.job_id)
        incident.start_time.FromNanoseconds(int(window.now * 1e9))
        self._by_id[incident.id] = incident
        if len(self._by_id) > self._incidents_max:
            del self._by_id[next(iter(self._by_id))]
        return incident


def _end(incident: pb.Incident | None, window: NodeWindow) -> None:
    if incident is not None:
        incident.end_time.FromNanoseconds(int(window.now * 1e9))


def _act(incident: pb.Incident, directive: Directive) -> None:
    """Add what is done, unless it is what was done last."""
    action = f"{_done(directive.share)}: {directive.reason}"
    if not incident.actions or incident.actions[-1] != action:
        incident.actions.append(action)
        del incident.actions[:-ACTIONS_MAX]


def _done(share: float) -> str:
    if share <= 0:
        return "suspended"
    return "freed" if share >= 1 else f"held to {share:.0%} of its speed"
