"""Incident log: one incident lasts from the first throttling of an attempt until it is unthrottled.

A bounded number of incidents is kept in memory. The policy's directives name the throttled attempt, the victim and the
reason. The effect is computed from the windows: the victim's rate, or its GPU utilization if it reports no rate, over
the last few windows, relative to its baseline when the incident began.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cotenant import telemetry
from cotenant.codec.specs import seconds
from cotenant.core.policy.protocols import AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.v1 import contention_service_pb2 as pb

INCIDENTS_MAX = 1_000
ACTIONS_MAX = 100  # per incident; the oldest are dropped
SILENT_SECONDS_MAX = 900.0  # after which a silent node's incidents are closed
RECENT_WINDOWS = 3

Attempt = tuple[str, int]  # job, number

begun = telemetry.counter("cotenant.contention.incidents", "{incident}", "Contention incidents opened.")
ended = telemetry.counter("cotenant.contention.outcomes", "{incident}", "Contention incidents closed, by outcome.")


@dataclass(slots=True)
class OpenIncident:
    """An open incident. `baseline` is the victim's speed without contention, in the unit of its speed; 0: unknown."""

    incident: pb.Incident
    share: float = 1.0
    last_action: str = ""  # with its reason
    baseline: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_WINDOWS))

    def see(self, window: NodeWindow) -> None:
        """Record the victim's present speed."""
        speed = victim_speed(window, self.incident.victim_job_id)
        if speed is not None and self.baseline > 0:
            self.recent.append(speed)
            self.incident.recovered = sum(self.recent) / len(self.recent) / self.baseline

    def compare(self, window: NodeWindow, directive: Directive) -> None:
        """Record the victim's slowdown, and derive its baseline from it."""
        incident = self.incident
        if directive.victim_job_id and not incident.victim_job_id:
            incident.victim_job_id = directive.victim_job_id
        if directive.victim_job_id == incident.victim_job_id and directive.victim_slowdown > incident.slowdown:
            incident.slowdown = min(1.0, directive.victim_slowdown)
        speed = victim_speed(window, incident.victim_job_id)
        if not self.baseline and speed is not None and 0 < directive.victim_slowdown < 1:
            self.baseline = speed / (1 - directive.victim_slowdown)


class IncidentLog:
    """The newest incidents, open and closed."""

    def __init__(self, incidents_max: int = INCIDENTS_MAX) -> None:
        self._incidents_max = incidents_max
        self._by_id: dict[str, pb.Incident] = {}  # ordered by id, and so by start
        self._open: dict[str, dict[Attempt, OpenIncident]] = {}  # by node
        self._seen: dict[str, float] = {}  # last window of nodes with open incidents
        self._made = 0
        self._id = secrets.token_hex(4)  # ids of incidents begin again in another log: so do page tokens

    def record(self, window: NodeWindow, directives: Sequence[Directive]) -> None:
        """Open, continue and close the incidents of a node by its new directives."""
        still_open = self._open.pop(window.node_id, {})
        self._seen.pop(window.node_id, None)
        for one in still_open.values():
            one.see(window)
        for directive in directives:
            attempt = directive.job_id, directive.number
            if throttles(directive) and attempt not in still_open:
                still_open[attempt] = self._begin(window, directive.job_id)
            if attempt in still_open:
                still_open[attempt].compare(window, directive)
                _add_action(still_open[attempt], window, directive)
            if not throttles(directive) and attempt in still_open:
                _end(still_open.pop(attempt), window.now, "it is free again")
        present = {(attempt.job_id, attempt.number) for attempt in window.attempts}
        for attempt in still_open.keys() - present:  # attempts that left the node
            _end(still_open.pop(attempt), window.now, "it has left the node")
        if still_open:
            self._open[window.node_id], self._seen[window.node_id] = still_open, window.now

    def inherit(self, window: NodeWindow, attempt: AttemptWindow) -> None:
        """Open an incident for an attempt that was throttled before this process started."""
        one = self._begin(window, attempt.job_id)
        one.share = 0.0
        one.incident.actions.append(f"{clock(window.now)} it was already throttled: {throttle_text(attempt.throttle)}")
        self._open.setdefault(window.node_id, {})[attempt.job_id, attempt.number] = one
        self._seen[window.node_id] = window.now

    def is_open(self, node_id: str, attempt: Attempt) -> bool:
        """Return whether an attempt on a node is the suspect of an open incident."""
        return attempt in self._open.get(node_id, {})

    def add_action(self, node_id: str, attempt: Attempt, now: float, sentence: str) -> None:
        """Add the outcome of an action to an open incident."""
        if one := self._open.get(node_id, {}).get(attempt):
            _add(one.incident, f"{clock(now)} {sentence}")

    async def page(
        self, node_id: str, size: int, token: str, job_id: str = "", *, open_only: bool = False
    ) -> pb.ListIncidentsResponse:
        """Return a page of incidents, newest first, optionally of one node or one job."""
        ids = [
            id
            for id, incident in self._by_id.items()
            if node_id in ("", incident.node_id)
            and job_id in ("", incident.victim_job_id, incident.suspect_job_id)
            and not (open_only and incident.HasField("end_time"))
        ]
        asked = PageRequest.read(size, token, f"incidents {self._id}/{node_id}/{job_id}/{open_only}")
        page = await page_of_messages(ids, self._by_id.get, asked, descending=True)
        return pb.ListIncidentsResponse(incidents=page.items, next_page_token=page.next_token)

    def forget_silent(self, now: float) -> None:
        """Close the incidents of nodes that have been silent for long."""
        for node_id in [node for node, seen in self._seen.items() if now - seen > SILENT_SECONDS_MAX]:
            seen = self._seen.pop(node_id)
            for one in self._open.pop(node_id).values():
                _end(one, seen, "the node fell silent")

    def _begin(self, window: NodeWindow, suspect: str) -> OpenIncident:
        self._made += 1
        incident = pb.Incident(id=f"{self._made:012d}", node_id=window.node_id, suspect_job_id=suspect)
        incident.start_time.FromNanoseconds(int(window.now * 1e9))
        self._by_id[incident.id] = incident
        begun.add()
        if len(self._by_id) > self._incidents_max:
            del self._by_id[next(iter(self._by_id))]
        return OpenIncident(incident)


def throttles(directive: Directive) -> bool:
    """Return whether a directive throttles its attempt."""
    return directive.share < 1 if directive.throttle is None else not directive.throttle.free


def victim_speed(window: NodeWindow, job_id: str) -> float | None:
    """Return a job's speed: its rate, or else its GPU utilization; None if neither is known or steady."""
    found = [at for at in window.attempts if at.job_id == job_id and at.steady]
    if not found:
        return None
    return found[0].rate_per_second or found[0].gpu_utilisation_percent


def clock(now: float) -> str:
    """Return the time of day as text.

    >>> clock(3661.0)
    '01:01:01Z'
    """
    return datetime.fromtimestamp(now, UTC).strftime("%H:%M:%SZ")


def throttle_text(throttle: Throttle) -> str:
    """Return how an attempt is throttled, as text.

    >>> throttle_text(Throttle(cores=1, idle=True)), throttle_text(Throttle(bandwidth_percent=20))
    ('held to 1 of its cores and to idle CPU time', 'held to 20 % of the memory bandwidth')
    """
    if throttle.suspended:
        return "suspended"
    ways = [f"to {throttle.bandwidth_percent} % of the memory bandwidth"] if throttle.bandwidth_percent < 100 else []
    ways += [f"to {throttle.cores} of its cores"] if throttle.cores else []
    ways += ["to idle CPU time"] if throttle.idle else []
    return "held " + " and ".join(ways) if ways else "freed"


def _add_action(one: OpenIncident, window: NodeWindow, directive: Directive) -> None:
    """Add an action, with the victim's speed, unless it repeats the last one."""
    done = _share_text(directive.share) if directive.throttle is None else throttle_text(directive.throttle)
    action = f"{done}{' and asked to move away' if directive.move else ''}: {directive.reason}"
    if action == one.last_action:
        return
    one.last_action, one.share = action, directive.share
    speed = victim_speed(window, one.incident.victim_job_id)
    if speed is not None and one.baseline > 0:
        action += f" ({one.incident.victim_job_id} at {speed / one.baseline:.0%} of its baseline)"
    _add(one.incident, f"{clock(window.now)} {action}")


def _add(incident: pb.Incident, action: str) -> None:
    incident.actions.append(action)
    del incident.actions[:-ACTIONS_MAX]


def _end(one: OpenIncident, now: float, why: str) -> None:
    incident = one.incident
    incident.end_time.FromNanoseconds(int(now * 1e9))
    lasted = now - seconds(incident.start_time)
    incident.outcome = f"{why} after {lasted:.0f} s"
    if incident.victim_job_id and one.recent:
        incident.outcome += f"; {incident.victim_job_id} is at {incident.recovered:.0%} of its baseline"
        incident.outcome += f", from {1 - incident.slowdown:.0%}"
    ended.add(outcome=why)
    telemetry.record(
        "incident",
        "",
        seconds(incident.start_time),
        now,
        node=incident.node_id,
        victim=incident.victim_job_id,
        suspect=incident.suspect_job_id,
        slowdown=incident.slowdown,
        recovered=incident.recovered,
        actions=len(incident.actions),
    )


def _share_text(share: float) -> str:
    if share <= 0:
        return "suspended"
    return "freed" if share >= 1 else f"held to {share:.0%} of its speed"
