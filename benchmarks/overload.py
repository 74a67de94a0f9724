"""Whether trouble spreads where a cluster has more to do than it can: five kinds of trouble, three sizes.

Two processes of each service, an etcd of three members and all agents, simulated, share a machine, which as many jobs
as are brought to running keep busy all the while. Then comes something that is too much for it; afterwards each job
that was acknowledged must have run, and once; no node may have been given up, for all agents were there; offices may
have passed on only where their holder was stopped; and jobs must be brought to running as quickly as before, soon.
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
BUSY, TIMES = 8, 3  # busy processes; as many jobs as can be brought to running, so many times
RECOVERED_SHARE, RECOVERY_BAR_SECONDS, RECOVERY_SECONDS_MAX = 0.8, 10.0, 120.0
CALL_SECONDS_MAX, RETRY_SECONDS = 60.0, 0.2
CALLS_MAX = 2_000  # of the other process, that are under way at once
GIVEN_UP = '"state": "lost"'


# Callers -----------------------------------------------------------------------------------------------------


@dataclass
class RetryingSubmitter:
    """Callers who submit, and ask again under the same request id until they are answered."""

    jobs: job_service_pb2_grpc.JobServiceAsyncStub
    acknowledged: list[str] = field(default_factory=list)
    failed: int = 0  # calls that had to be made again

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
    """Be the other process: submit at a pace, whether or not there are answers, until the input ends."""
    ended, calls = asyncio.Event(), set[asyncio.Future[None]]()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    async with connect(endpoint, token) as channel:
        submitter = RetryingSubmitter(job_service_pb2_grpc.JobServiceStub(channel))  # type: ignore[arg-type]  # is async
        began, bench = time.perf_counter(), 0
        while not ended.is_set():
            due = int((time.perf_counter() - began) * rate)
            while bench < due and len(calls) < CALLS_MAX:
                bench += 1
                calls.add(call := asyncio.ensure_future(submitter.one()))
                call.add_done_callback(calls.discard)
            await asyncio.sleep(0.01)
        took = time.perf_counter() - began
        await asyncio.gather(*calls)
        print(json.dumps({"made": bench / took, "ids": submitter.acknowledged, "failed": submitter.failed}))


# Trouble -----------------------------------------------------------------------------------------------------


@dataclass
class Experiment:
    """A cluster before, in and after some trouble. `store` is to look who leads."""

    bench: Cluster
    store: Store
    submitter: RetryingSubmitter
    calm: float = 0.0  # jobs a second
    other: Sequence[str] = ()  # jobs that were acknowledged to the other process
    asked: float = 0.0  # calls a second of the other process

    async def leader(self, service: str) -> tuple[str, str] | None:
        """Where a service is led, and by whom; None where it is not, or the store does not say."""
        with contextlib.suppress(StoreUnavailable):
            entry = await self.store.get(f"{service}/leader")
            if found := leader_in(entry) if entry else None:
                return found.address, found.identity
        return None


async def more_jobs(experiment: Experiment) -> AsyncIterator[None]:
    """Submit in another process as many jobs more as make three times what can be brought to running."""
    told = [
        experiment.bench.processes.endpoints["queue"],
        experiment.bench.processes.token,
        str((TIMES - 1) * experiment.calm),
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--submit", *told),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    try:
        yield
    finally:
        out, _ = await process.communicate(b"")  # the end of its input
    came_of_it = json.loads(out)
    experiment.other, experiment.asked = came_of_it["ids"], came_of_it["made"]
    experiment.submitter.failed += came_of_it["failed"]


async def busy_machine(experiment: Experiment) -> AsyncIterator[None]:
    """Have the machine's processors shared with processes that never rest."""
    busy = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            await process.wait()


async def stopped_leader(experiment: Experiment) -> AsyncIterator[None]:
    """Stop the placement that leads, and let it go on."""
    if (led := await experiment.leader("placement")) is None:
        raise RuntimeError("no placement leads")
    os.kill(pid := experiment.bench.processes.pid_at(led[0]), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def stopped_placements(experiment: Experiment) -> AsyncIterator[None]:
    """Stop all placements, and let them go on."""
    pids = [pid for name, pid in experiment.bench.processes.pids.items() if name.startswith("placement")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def etcd_leader_gone(experiment: Experiment) -> AsyncIterator[None]:
    """Kill the member of etcd that leads, and start it again."""
    members = experiment.bench.processes.etcd
    leader = await asyncio.to_thread(leader_of, members)
    leader.kill()
    yield
    leader.start(wait=False)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What is too much, for how long, and how many leaders it may cost."""

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
    """Looks who leads, all the time. A new term of the same leader's, as after a doubtful commit, is no change."""

    def __init__(self, experiment: Experiment) -> None:
        self.seen: dict[str, list[str]] = {service: [] for service in ELECTED_SERVICES}
        self._experiment = experiment
        self._polling = asyncio.ensure_future(self._poll())

    @property
    def changes(self) -> int:
        """So often an office passed on, or was won anew."""
        return sum(max(0, len(holders) - 1) for holders in self.seen.values())

    async def _poll(self) -> None:
        while True:
            for service, holders in self.seen.items():
                led = await self._experiment.leader(service)
                if led and (not holders or led[1] != holders[-1]):
                    holders.append(led[1])
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Look no more."""
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)


# Measuring ---------------------------------------------------------------------------------------------------


def recovery_seconds(times: Sequence[float], ended: float, rate: float, until_seconds: float) -> float | None:
    """Say how long after the end of the trouble jobs were brought to running as quickly as wanted; None where never.

    `times` are those at which jobs came to their agents, in order; `until_seconds` is when nobody looked any more.

    >>> recovery_seconds([10.1, 12.5, 13.0, 13.5, 14.0, 14.5], 10.0, 1.5, 16.0)
    2.0
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
    """Bring jobs to running, before, in and after some trouble, until all have run that were acknowledged."""
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
    with contextlib.suppress(TimeoutError):  # the figure tells
        await until(lambda: wanted <= bench.started.keys(), RECOVERY_SECONDS_MAX)
    await leaders.close()
    measuring_lag.cancel()
    given_up, restarts, lost = (
        _given_up(bench) - given_up,
        bench.restarts.total() - restarts,
        len(wanted - bench.started.keys()),
    )
    told, back = f"{where}, {disturbance.name}", RECOVERY_SECONDS_MAX if back is None else back
    changed = leaders.changes
    return [
        harness.Row(
            f"{told}: back to {RECOVERED_SHARE:.0%} of the jobs a second after", back, "s",
            bar=f"≤ {RECOVERY_BAR_SECONDS:g}", holds=back <= RECOVERY_BAR_SECONDS,
        ),
        harness.Row(f"{told}: brought to running meanwhile", during, "1/s", experiment.calm, "before"),
        *([harness.Row(f"{told}: asked for beside", experiment.asked, "1/s", experiment.calm, "before")] if experiment.asked else []),
        harness.Row(f"{told}: parts of jobs given up", given_up, "", bar="0", holds=not given_up),
        harness.Row(
            f"{told}: leaders that changed", changed, "",
            bar=f"≤ {disturbance.leaders_max}", holds=changed <= disturbance.leaders_max,
        ),
        harness.Row(f"{told}: starts of jobs that had begun", restarts, "", bar="0", holds=not restarts),
        harness.Row(
            f"{told}: jobs acknowledged that never ran", lost, "", len(wanted), "acknowledged", bar="0", holds=not lost
        ),
        harness.Row(f"{told}: calls made again", experiment.submitter.failed, ""),
        harness.Row(f"{told}: the agents' own process was late by, at most", loop_lag.longest_seconds, "s"),
    ]  # fmt: skip


def _given_up(bench: Cluster) -> int:
    return sum(bench.processes.told("attempt_part_given_up", GIVEN_UP).values())


async def _rate(bench: Cluster, seconds: float) -> float:
    started, began = len(bench.started), time.perf_counter()
    await asyncio.sleep(seconds)
    return (len(bench.started) - started) / (time.perf_counter() - began)


async def measure_size(nodes: int, directory: Path) -> list[harness.Row]:
    """Bring all kinds of trouble over a cluster, one after the other; what is known is told at once."""
    rows: list[harness.Row] = []
    wanted = os.environ.get("COTENANT_TROUBLES", "")  # words of some, to look at those alone
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
    """Tell what came of all sizes and all kinds of trouble at once."""
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
