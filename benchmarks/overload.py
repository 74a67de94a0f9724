"""The behavior of an overloaded cluster: five kinds of disturbance, three cluster sizes.

Two processes of each service, an etcd of three members and all agents, simulated, share a machine that is kept busy by
as many jobs as can be started. Then a disturbance exceeds what the machine can do. Afterwards each acknowledged job
must have run exactly once; no node may have been declared lost, because all agents were there; a leader may have
changed only if it was stopped; and jobs must soon start as quickly as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from bisect import bisect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.cluster import AGENTS, WARM_SECONDS, spec, steadily  # noqa: E402 - likewise
from benchmarks.processes import Cluster, cluster, until  # noqa: E402 - likewise
from tests.support.etcd_server import etcd_binary, leader_of  # noqa: E402 - likewise

from cotenant.leadership.leadership_term import leader_of as leader_in  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.rpc.loop_lag import LoopLagMonitor  # noqa: E402 - likewise
from cotenant.store.open import open_store  # noqa: E402 - likewise
from cotenant.store.port import Store, StoreUnavailable  # noqa: E402 - likewise
from cotenant.v1 import job_service_pb2 as pb  # noqa: E402 - likewise
from cotenant.v1 import job_service_pb2_grpc  # noqa: E402 - likewise

QUICK_AGENTS = (100,)
HEARTBEAT_SECONDS, LOST_AFTER_SECONDS = 2.0, 30.0
SETTINGS = f"heartbeat_seconds = {HEARTBEAT_SECONDS}\nlost_after_seconds = {LOST_AFTER_SECONDS}\n"
ELECTED_SERVICES = ("queue", "placement", "predictor")
POLL_SECONDS = 0.25
CALM_SECONDS, WINDOW_SECONDS, AFTER_SECONDS = 8.0, 2.0, 12.0
DISTURBANCE_SECONDS, STOPPED_SECONDS, DOWN_SECONDS = 15.0, LOST_AFTER_SECONDS + 5, 5.0
BUSY, TIMES = 8, 3  # busy processes; the multiple of the jobs that can be started
RECOVERED_SHARE, RECOVERY_BAR_SECONDS, RECOVERY_SECONDS_MAX = 0.8, 10.0, 120.0
CALL_SECONDS_MAX, RETRY_SECONDS = 60.0, 0.2
CALLS_MAX = 2_000  # concurrent calls of the other process
GIVEN_UP = '"state": "lost"'


# Submitters --------------------------------------------------------------------------------------------------


@dataclass
class RetryingSubmitter:
    """Submits jobs, with retries under the same request id until the call is answered."""

    jobs: job_service_pb2_grpc.JobServiceAsyncStub
    acknowledged: list[str] = field(default_factory=list)
    failed: int = 0  # calls that had to be retried

    async def one(self) -> None:
        """Submit a job."""
        request = pb.CreateJobRequest(spec=spec(), request_id=uuid.uuid4().hex)
        while True:
            try:
                answer = await self.jobs.CreateJob(request, timeout=CALL_SECONDS_MAX)
                self.acknowledged.append(str(answer.job.id))
                return
            except grpc.aio.AioRpcError:
                self.failed += 1
                await asyncio.sleep(RETRY_SECONDS)


async def submit_at(endpoint: str, token: str, rate: float) -> None:
    """Run as the other process: submit at a constant rate, independent of the answers, until stdin is closed."""
    ended, calls = asyncio.Event(), set[asyncio.Future[None]]()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    async with connect(endpoint, token) as channel:
        submitter = RetryingSubmitter(job_service_pb2_grpc.JobServiceStub(channel))  # type: ignore[arg-type]  # is async
        began, sent = time.perf_counter(), 0
        while not ended.is_set():
            due = int((time.perf_counter() - began) * rate)
            while sent < due and len(calls) < CALLS_MAX:
                sent += 1
                calls.add(call := asyncio.ensure_future(submitter.one()))
                call.add_done_callback(calls.discard)
            await asyncio.sleep(0.01)
        took = time.perf_counter() - began
        await asyncio.gather(*calls)
        print(json.dumps({"made": sent / took, "ids": submitter.acknowledged, "failed": submitter.failed}))


# Disturbances ------------------------------------------------------------------------------------------------


@dataclass
class Experiment:
    """A cluster before, during and after a disturbance. `store` is for reading the leaders."""

    bench: Cluster
    store: Store
    submitter: RetryingSubmitter
    calm: float = 0.0  # job starts per second before
    other: Sequence[str] = ()  # jobs acknowledged to the other process
    asked: float = 0.0  # calls per second of the other process

    async def leader(self, service: str) -> tuple[str, str] | None:
        """Return address and identity of the leader of a service; None if there is none or the store is unavailable."""
        with contextlib.suppress(StoreUnavailable):
            entry = await self.store.get(f"{service}/leader")
            if found := leader_in(entry) if entry else None:
                return found.address, found.identity
        return None


async def more_jobs(experiment: Experiment) -> AsyncIterator[None]:
    """Submit more jobs in another process, to a total of three times the jobs that can be started."""
    arguments = [
        experiment.bench.processes.endpoints["queue"],
        experiment.bench.processes.token,
        str((TIMES - 1) * experiment.calm),
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--submit", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    try:
        yield
    finally:
        out, _ = await process.communicate(b"")  # closes its stdin
    outcome = json.loads(out)
    experiment.other, experiment.asked = outcome["ids"], outcome["made"]
    experiment.submitter.failed += outcome["failed"]


async def busy_machine(experiment: Experiment) -> AsyncIterator[None]:
    """Run busy loops in other processes."""
    busy = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            await process.wait()


async def stopped_leader(experiment: Experiment) -> AsyncIterator[None]:
    """Pause the leading placement, then resume it."""
    if (led := await experiment.leader("placement")) is None:
        raise RuntimeError("placement has no leader")
    os.kill(pid := experiment.bench.processes.pid_at(led[0]), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def stopped_placements(experiment: Experiment) -> AsyncIterator[None]:
    """Pause all placements, then resume them."""
    pids = [pid for name, pid in experiment.bench.processes.pids.items() if name.startswith("placement")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def etcd_leader_gone(experiment: Experiment) -> AsyncIterator[None]:
    """Kill the leading member of etcd and restart it."""
    members = experiment.bench.processes.etcd
    leader = await asyncio.to_thread(leader_of, members)
    leader.kill()
    yield
    leader.start(wait=False)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A disturbance, its duration, and the allowed number of leader changes."""

    name: str
    begin: Callable[[Experiment], AsyncIterator[None]]
    seconds: float
    leaders_max: int = 0


DISTURBANCES = (
    Disturbance(f"{TIMES} times the jobs", more_jobs, DISTURBANCE_SECONDS),
    Disturbance(f"{BUSY} busy processes beside it", busy_machine, DISTURBANCE_SECONDS),
    Disturbance("etcd's leader killed", etcd_leader_gone, DOWN_SECONDS),
    Disturbance("the leading placement stopped", stopped_leader, STOPPED_SECONDS, leaders_max=1),
    Disturbance("all placements stopped", stopped_placements, STOPPED_SECONDS, leaders_max=1),
)


class LeaderWatch:
    """Polls the leaders. A new term of the same leader, as after an unknown outcome of a commit, is no change."""

    def __init__(self, experiment: Experiment) -> None:
        self.seen: dict[str, list[str]] = {service: [] for service in ELECTED_SERVICES}
        self._experiment = experiment
        self._polling = asyncio.ensure_future(self._poll())

    @property
    def changes(self) -> int:
        """The number of leader changes."""
        return sum(max(0, len(holders) - 1) for holders in self.seen.values())

    async def _poll(self) -> None:
        while True:
            for service, holders in self.seen.items():
                led = await self._experiment.leader(service)
                if led and (not holders or led[1] != holders[-1]):
                    holders.append(led[1])
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Stop polling."""
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)


# Measuring ---------------------------------------------------------------------------------------------------


def recovery_seconds(times: Sequence[float], ended: float, rate: float, until_seconds: float) -> float | None:
    """Return the seconds from the end of the disturbance until jobs start at a rate again; None if they never do.

    `times` are the sorted times at which jobs arrived at agents; `until_seconds` is the end of the observation.

    >>> recovery_seconds([10.1, 12.5, 13.0, 13.5, 14.0, 14.5], 10.0, 1.5, 16.0)
    1.5
    >>> recovery_seconds([10.1], 10.0, 1.5, 16.0) is None
    True
    """
    step = POLL_SECONDS
    for number in range(int((until_seconds - ended - WINDOW_SECONDS) / step) + 1):
        begin = ended + number * step
        if bisect(times, begin + WINDOW_SECONDS) - bisect(times, begin) >= rate * WINDOW_SECONDS:
            return number * step
    return None


async def measure_disturbance(bench: Cluster, store: Store, disturbance: Disturbance, where: str) -> list[harness.Row]:
    """Start jobs before, during and after a disturbance, until all acknowledged jobs have run."""
    experiment = Experiment(bench, store, RetryingSubmitter(bench.jobs))
    restarts, given_up = bench.restarts.total(), _given_up(bench)
    leaders, loop_lag = LeaderWatch(experiment), LoopLagMonitor()
    measuring_lag = asyncio.ensure_future(loop_lag.run())
    async with steadily(bench, experiment.submitter.one):
        await asyncio.sleep(WARM_SECONDS)
        experiment.calm = await _rate(bench, CALM_SECONDS)
        async with asynccontextmanager(disturbance.begin)(experiment):
            during = await _rate(bench, disturbance.seconds)
            ended = time.perf_counter()
        back = None
        while back is None and time.perf_counter() < ended + RECOVERY_SECONDS_MAX:
            await asyncio.sleep(WINDOW_SECONDS)
            back = recovery_seconds(
                list(bench.started.values()), ended, RECOVERED_SHARE * experiment.calm, time.perf_counter()
            )
        await asyncio.sleep(max(0.0, ended + AFTER_SECONDS - time.perf_counter()))
    wanted = {*experiment.submitter.acknowledged, *experiment.other}
    with contextlib.suppress(TimeoutError):  # the figure shows it
        await until(lambda: wanted <= bench.started.keys(), RECOVERY_SECONDS_MAX)
    await leaders.close()
    measuring_lag.cancel()
    given_up, restarts, lost = (
        _given_up(bench) - given_up,
        bench.restarts.total() - restarts,
        len(wanted - bench.started.keys()),
    )
    name, back = f"{where}, {disturbance.name}", RECOVERY_SECONDS_MAX if back is None else back
    changed = leaders.changes
    return [
        harness.Row(
            f"{name}: back to {RECOVERED_SHARE:.0%} of the jobs a second after", back, "s",
            bar=f"≤ {RECOVERY_BAR_SECONDS:g}", holds=back <= RECOVERY_BAR_SECONDS,
        ),
        harness.Row(f"{name}: brought to running meanwhile", during, "1/s", experiment.calm, "before"),
        *(
            [harness.Row(f"{name}: asked for beside", experiment.asked, "1/s", experiment.calm, "before")]
            if experiment.asked
            else []
        ),
        harness.Row(f"{name}: parts of jobs given up", given_up, "", bar="0", holds=not given_up),
        harness.Row(
            f"{name}: leaders that changed", changed, "",
            bar=f"≤ {disturbance.leaders_max}", holds=changed <= disturbance.leaders_max,
        ),
        harness.Row(f"{name}: starts of jobs that had begun", restarts, "", bar="0", holds=not restarts),
        harness.Row(
            f"{name}: jobs acknowledged that never ran", lost, "", len(wanted), "acknowledged", bar="0", holds=not lost
        ),
        harness.Row(f"{name}: calls made again", experiment.submitter.failed, ""),
        harness.Row(f"{name}: the agents' own process was late by, at most", loop_lag.longest_seconds, "s"),
    ]  # fmt: skip


def _given_up(bench: Cluster) -> int:
    return sum(bench.processes.event_counts("attempt_part_given_up", GIVEN_UP).values())


async def _rate(bench: Cluster, seconds: float) -> float:
    started, began = len(bench.started), time.perf_counter()
    await asyncio.sleep(seconds)
    return (len(bench.started) - started) / (time.perf_counter() - began)


async def measure_size(nodes: int, directory: Path) -> list[harness.Row]:
    """Measure all disturbances on a cluster, one after another; print each figure as soon as it is known."""
    rows: list[harness.Row] = []
    wanted = os.environ.get("COTENANT_TROUBLES", "")  # part of a name, to select disturbances
    async with cluster(nodes, directory / f"of-{nodes}", replicas=2, settings=SETTINGS) as bench:
        store = await open_store(bench.processes.store_url)
        try:
            for disturbance in DISTURBANCES:
                if wanted in disturbance.name:
                    more = await measure_disturbance(bench, store, disturbance, f"{nodes:,} agents")
                    rows += more
                    sys.stderr.writelines(f"{row.name}: {row.value:,.4g} {row.unit}\n" for row in more)
        finally:
            await store.close()
    return rows


def summary(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """Summarize all sizes and disturbances."""
    backs = [row.value for row in rows if "jobs a second after" in row.name]
    return [
        harness.Row("all: the longest until jobs were brought to running as before", max(backs), "s"),
        harness.Row("all: half of them took", statistics.median(backs), "s"),
    ] if backs else []  # fmt: skip


async def _measure(sizes: Sequence[int]) -> list[harness.Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as directory:
        for nodes in sizes:
            rows += await measure_size(nodes, Path(directory))
    return [*rows, *summary(rows)]


def measure(quick: bool) -> Sequence[harness.Row]:
    """Measure three clusters, or a small one."""
    if etcd_binary() is None:
        return [harness.Row("etcd: no binary here, not measured", 0.0, "")]
    return asyncio.run(_measure(QUICK_AGENTS if quick else AGENTS))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--submit"]:
        asyncio.run(submit_at(sys.argv[2], sys.argv[3], float(sys.argv[4])))
    else:
        harness.main(measure, __doc__ or "")
