"""Names what is slow but alive, and clocks that are off, from what processes and agents tell of themselves.

Theory of operation. Everything is slow for a moment on a busy machine, so nothing is named for one moment. An event
loop is named where it was behind by a second or more in two of the last three windows of 10 s: a leader's lease lasts
two seconds. The store is named by a median, which single slow calls do not move. A call to the store waits for the
caller's own event loop a few times; so much is subtracted before the store is blamed. A clock is compared with the
median of all clocks, this machine's among them, so that one clock that is off does not make all others look wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cotenant.cli.mesh.problems import Wrong
from cotenant.cli.units import short_seconds
from cotenant.cli.views import View

WINDOWS_BEHIND_MIN = 2  # of the last three: a single stall is over when it is read of
STORE_SECONDS_MAX = 0.1  # the median; etcd takes some milliseconds, and a slow disk tens of them
STORE_CALLS_MIN = 5
LOOP_TURNS = 5  # how often a call to the store waits for the event loop
CLOCK_SECONDS_MAX = 2.0  # expiries of certificates and tokens bear that, and so do times that people read
BEATS_LATE_MIN = 2.0  # a node is away after three
THIS_MACHINE = "this machine"

LOOP_REMEDY = "see `loop_stalled` in its log for the call that takes long; give it a CPU of its own, or ask less of it"
AGENT_REMEDY = "see whether its machine is overloaded or halts now and then; jobs that run there run on"
STORE_REMEDY = "see the disk and the network of the store's members (`etcdctl check perf`), and what else uses them"
CLOCK_REMEDY = "set it right, and keep it so with chrony or systemd-timesyncd"
LATE_REMEDY = "see the load of its machine and the network to placement"


def slow_parts(processes: Sequence[View], nodes: Sequence[View]) -> list[Wrong]:
    """Name every part that is slow or whose clock is off: of views as `--json` prints them."""
    return [
        *_of_store(processes),
        *_of_loops(processes),
        *_of_agents(nodes),
        *_of_clocks(processes, nodes),
    ]


def _of_loops(processes: Sequence[View]) -> Iterator[Wrong]:
    for where, one in _by_process(processes):
        if what := _behind(one, "its event loop"):
            yield Wrong(where, what, LOOP_REMEDY)


def _behind(view: View, whose: str) -> str:
    """Return how a loop is behind, in words; "" where it is not, or nothing is known of it."""
    lag = view["loop_lag"]
    if lag is None or lag["windows_behind"] < WINDOWS_BEHIND_MIN:
        return ""
    share = f"{100 * lag['behind_share']:.0f} % of the time"
    return f"{whose} was behind by {lag['longest_seconds']:.1f} s within the last 30 s, {share}"


def _of_store(processes: Sequence[View]) -> Iterator[Wrong]:
    """Name the store once, by the process that waits the longest for it."""
    found = []
    for where, one in _by_process(processes):
        told, lag = one["store_latency"], one["loop_lag"]
        if told is None or told["calls"] < STORE_CALLS_MIN:
            continue
        own = LOOP_TURNS * lag["median_seconds"] if lag else 0.0
        if told["median_seconds"] - own >= STORE_SECONDS_MAX:
            found.append((told["median_seconds"], where))
    if found:
        median, where = max(found)
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        what = f"it takes {1000 * median:.0f} ms to answer (median of the last 30 s), as {where}{others} sees it"
        yield Wrong("store", what, STORE_REMEDY)


def _of_agents(nodes: Sequence[View]) -> Iterator[Wrong]:
    for one in nodes:
        if late := lateness(one):
            yield Wrong(one["id"], late, LATE_REMEDY)
        elif what := _behind(one, "its agent's event loop"):
            yield Wrong(one["id"], what, AGENT_REMEDY)


def lateness(node: View) -> str:
    """Return how the agent of a node that is there is late, in words; "" where it is not."""
    silence, every = node["silence_seconds"], node["heartbeat_seconds"]
    if node["state"] in ("away", "lost") or silence is None or not every or silence < BEATS_LATE_MIN * every:
        return ""
    return f"its agent is late: last heard {short_seconds(silence)} ago, expected every {short_seconds(every)}"


def _of_clocks(processes: Sequence[View], nodes: Sequence[View]) -> Iterator[Wrong]:
    """Name clocks that differ from the median; of two medians the one nearer to this machine's clock counts."""
    clocks = [(THIS_MACHINE, 0.0, 0.0)]
    clocks += [
        (where, one["clock_offset_seconds"], one["clock_error_seconds"])
        for where, one in _by_process(processes)
        if one["clock_offset_seconds"] is not None
    ]
    leads = next(
        (one for one in processes if one["service"] == "placement" and one["state"] in ("leads", "serves")), {}
    )
    if (base := leads.get("clock_offset_seconds")) is not None:  # agents' clocks are told by placement's
        error = leads["clock_error_seconds"]
        told = [(one["id"], one["clock_offset_seconds"]) for one in nodes if one["clock_offset_seconds"] is not None]
        clocks += [(where, base + offset, error) for where, offset in told]
    offsets = sorted(offset for _, offset, _ in clocks)
    middle = offsets[(len(offsets) - 1) // 2], offsets[len(offsets) // 2]
    median = min(middle, key=abs)
    for where, offset, error in clocks:
        if abs(offset - median) - error > CLOCK_SECONDS_MAX:
            yield Wrong(where, f"its clock is {off_in_words(offset - median)}", CLOCK_REMEDY)


def off_in_words(seconds: float) -> str:
    """Return by how much a clock is off.

    >>> off_in_words(86_400.2), off_in_words(-2.5)
    ('86,400 s ahead', '2.5 s behind')
    """
    much = f"{abs(seconds):,.0f}" if abs(seconds) >= 10 else f"{abs(seconds):.1f}"
    return f"{much} s {'ahead' if seconds > 0 else 'behind'}"


def _by_process(processes: Sequence[View]) -> Iterator[tuple[str, View]]:
    """Yield each process that answered once, named by its services and its address."""
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
