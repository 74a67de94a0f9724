"""Detection of parts that are slow but alive, and of wrong clocks, from reports of processes and agents.

Theory of operation. On a busy machine everything is slow for a moment, so no single measurement raises a problem. An
event loop is reported if it lagged by a second or more in two of the last three windows of 10 s: a leader's lease lasts
two seconds. The store is judged by its median latency, which single slow calls do not move. A call to the store waits
for the caller's own event loop a few times; that time is subtracted before the store is blamed. A clock is compared
with the median of all clocks, including this machine's, so that one wrong clock does not make all others look wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cotenant.cli.mesh.problems import MeshProblem
from cotenant.cli.units import short_seconds
from cotenant.cli.views import View

WINDOWS_BEHIND_MIN = 2  # of the last three: a single stall is over by the time it is reported
STORE_SECONDS_MAX = 0.1  # median; etcd takes some milliseconds, with a slow disk tens of milliseconds
STORE_CALLS_MIN = 5
LOOP_TURNS = 5  # event-loop iterations that a store call waits for
CLOCK_SECONDS_MAX = 2.0  # tolerable for expiry of certificates and tokens and for displayed times
HEARTBEATS_LATE_MIN = 2.0  # a node is marked away after three
THIS_MACHINE = "this machine"

LOOP_REMEDY = (
    "find the slow call under `loop_stalled` in its log; give the process a CPU of its own, or reduce its load"
)
AGENT_REMEDY = "check whether its machine is overloaded or pauses at times; jobs there keep running"
STORE_REMEDY = "check disk and network of the store's members (`etcdctl check perf`) and what else uses them"
CLOCK_REMEDY = "correct it, and keep it synchronized with chrony or systemd-timesyncd"
LATE_REMEDY = "check the load of its machine and the network to the placement service"


def slowness_problems(processes: Sequence[View], nodes: Sequence[View]) -> list[MeshProblem]:
    """Return problems of slow parts and wrong clocks; the arguments are views as `--json` prints them."""
    return [
        *_of_store(processes),
        *_of_loops(processes),
        *_of_agents(nodes),
        *_of_clocks(processes, nodes),
    ]


def _of_loops(processes: Sequence[View]) -> Iterator[MeshProblem]:
    for where, one in _by_process(processes):
        if what := _behind(one, "its event loop"):
            yield MeshProblem(where, what, LOOP_REMEDY)


def _behind(view: View, whose: str) -> str:
    """Return by how much a loop lags, as text; "" if it does not, or is unknown."""
    lag = view["loop_lag"]
    if lag is None or lag["windows_behind"] < WINDOWS_BEHIND_MIN:
        return ""
    share = f"{100 * lag['behind_share']:.0f} % of the time"
    return f"{whose} was behind by up to {lag['longest_seconds']:.1f} s in the last 30 s, {share}"


def _of_store(processes: Sequence[View]) -> Iterator[MeshProblem]:
    """Yield one problem for a slow store, as seen by the process that waits longest for it."""
    found = []
    for where, one in _by_process(processes):
        latency, lag = one["store_latency"], one["loop_lag"]
        if latency is None or latency["calls"] < STORE_CALLS_MIN:
            continue
        own = LOOP_TURNS * lag["median_seconds"] if lag else 0.0
        if latency["median_seconds"] - own >= STORE_SECONDS_MAX:
            found.append((latency["median_seconds"], where))
    if found:
        median, where = max(found)
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        what = f"slow to answer: median latency {1000 * median:.0f} ms in the last 30 s, measured by {where}{others}"
        yield MeshProblem("store", what, STORE_REMEDY)


def _of_agents(nodes: Sequence[View]) -> Iterator[MeshProblem]:
    for one in nodes:
        if late := heartbeat_delay(one):
            yield MeshProblem(one["id"], late, LATE_REMEDY)
        elif what := _behind(one, "its agent's event loop"):
            yield MeshProblem(one["id"], what, AGENT_REMEDY)


def heartbeat_delay(node: View) -> str:
    """Return how late the heartbeat of a connected node's agent is, as text; "" if it is not."""
    silence, every = node["silence_seconds"], node["heartbeat_seconds"]
    if node["state"] in ("away", "lost") or silence is None or not every or silence < HEARTBEATS_LATE_MIN * every:
        return ""
    return f"its agent is late: last heartbeat {short_seconds(silence)} ago, expected every {short_seconds(every)}"


def _of_clocks(processes: Sequence[View], nodes: Sequence[View]) -> Iterator[MeshProblem]:
    """Yield clocks that differ from the median; of two medians, the one nearer to this machine's clock is used."""
    clocks = [(THIS_MACHINE, 0.0, 0.0)]
    clocks += [
        (where, one["clock_offset_seconds"], one["clock_error_seconds"])
        for where, one in _by_process(processes)
        if one["clock_offset_seconds"] is not None
    ]
    leads = next(
        (one for one in processes if one["service"] == "placement" and one["state"] in ("leads", "serves")), {}
    )
    if (base := leads.get("clock_offset_seconds")) is not None:  # agents' offsets are relative to placement's clock
        error = leads["clock_error_seconds"]
        latency = [(one["id"], one["clock_offset_seconds"]) for one in nodes if one["clock_offset_seconds"] is not None]
        clocks += [(where, base + offset, error) for where, offset in latency]
    offsets = sorted(offset for _, offset, _ in clocks)
    middle = offsets[(len(offsets) - 1) // 2], offsets[len(offsets) // 2]
    median = min(middle, key=abs)
    for where, offset, error in clocks:
        if abs(offset - median) - error > CLOCK_SECONDS_MAX:
            yield MeshProblem(where, f"its clock is {clock_error_text(offset - median)}", CLOCK_REMEDY)


def clock_error_text(seconds: float) -> str:
    """Return a clock's error as text.

    >>> clock_error_text(86_400.2), clock_error_text(-2.5)
    ('86,400 s ahead', '2.5 s behind')
    """
    much = f"{abs(seconds):,.0f}" if abs(seconds) >= 10 else f"{abs(seconds):.1f}"
    return f"{much} s {'ahead' if seconds > 0 else 'behind'}"


def _by_process(processes: Sequence[View]) -> Iterator[tuple[str, View]]:
    """Yield each process that answered, once, named by its services and address."""
    services: dict[str, list[str]] = {}
    for one in processes:
        if one["state"] != "away":
            services.setdefault(one["address"], []).append(one["service"])
    done = set()
    for one in processes:
        address = one["address"]
        if address in services and address not in done:
            done.add(address)
            yield f"{', '.join(services[address])} {address}", one
