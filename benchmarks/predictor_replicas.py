"""The cost of a second predictor: every replica has all that was learned, so any replica can answer.

Two processes on one etcd: a leader, which takes observations, and a follower. For several store sizes: memory, and the
CPU time to restore, to take observations (leader) or read their results (follower), and to answer queries.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks import harness  # noqa: E402 - likewise
from benchmarks.predictor import BATCH, observations, questions  # noqa: E402 - likewise
from benchmarks.predictor_service import COTENANT, _line_with, fill, until_restored  # noqa: E402 - likewise
from grpc_health.v1 import health_pb2_grpc  # noqa: E402 - likewise
from tests.support.etcd_server import EtcdServer  # noqa: E402 - likewise

from cotenant.internal.v1 import observation_service_pb2 as pb  # noqa: E402 - likewise
from cotenant.internal.v1 import observation_service_pb2_grpc  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.store.etcd import EtcdStore  # noqa: E402 - likewise
from cotenant.v1 import predictor_service_pb2_grpc as pb_grpc  # noqa: E402 - likewise

if TYPE_CHECKING:
    from cotenant.internal.v1.observation_service_pb2_grpc import ObservationServiceAsyncStub
    from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceAsyncStub

SIZES, SIZES_QUICK = (0, 1_000, 10_000, 100_000), (0, 1_000)
MODELS = 200  # with observations
ASKED = 20
SETTLED_SECONDS = 1.5  # more than twice the write delay of a predictor
IDLE_SHARE_MAX = 0.03  # of a core
POLICIES = "xiao-piecewise,history"  # without lightgbm-duration, which trains in a separate process


@dataclass
class Replica:
    """A predictor process and its stub."""

    process: psutil.Process
    stub: PredictorServiceAsyncStub
    observer: ObservationServiceAsyncStub
    restoring_s: float = 0.0

    @property
    def mib(self) -> float:
        """Its resident memory."""
        return float(self.process.memory_info().rss) / 2**20

    @property
    def busy_s(self) -> float:
        """Its CPU seconds so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def _measure(quick: bool) -> Sequence[harness.Row]:
    rows: list[harness.Row] = []
    empty = 0.0
    for ends in SIZES_QUICK if quick else SIZES:
        with tempfile.TemporaryDirectory() as directory:
            made = await _of(Path(directory), ends, empty)
        empty = empty or made[0].value
        rows += made
    return rows


async def _of(home: Path, ends: int, empty_mib: float) -> Sequence[harness.Row]:
    etcd = EtcdServer(home)
    etcd.start()
    try:
        store = EtcdStore([etcd.endpoint], timeout_seconds=30.0)
        await fill(store, ends)
        await store.close()
        (home / "settings.toml").write_text(f'predictor = "{POLICIES}"\n')
        async with AsyncExitStack() as stack:
            leader, follower = [await _started(stack, home, etcd.url) for _ in range(2)]
            return await _measured(leader, follower, ends, empty_mib)
    finally:
        etcd.kill()


async def _started(stack: AsyncExitStack, home: Path, store: str) -> Replica:
    started = await asyncio.create_subprocess_exec(
        *(COTENANT, "serve", "predictor", "--listen", "127.0.0.1:0", "--store", store),
        *("--config", str(home / "settings.toml")),
        env={"COTENANT_TOKEN": "secret", "COTENANT_STATE_DIR": str(home), "HOME": str(home), "PATH": "/usr/bin"},
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    stack.push_async_callback(started.wait)
    stack.callback(started.kill)
    address = (await _line_with(started.stderr, "serves at")).split()[-1]
    channel = await stack.enter_async_context(connect(address, "secret"))
    stub = cast("PredictorServiceAsyncStub", pb_grpc.PredictorServiceStub(channel))
    replica = Replica(
        psutil.Process(started.pid),
        stub,
        cast("ObservationServiceAsyncStub", observation_service_pb2_grpc.ObservationServiceStub(channel)),
    )
    await until_restored(stub, health_pb2_grpc.HealthStub(channel))
    await _settled(replica)  # a follower reports SERVING as soon as it knows the leader
    replica.restoring_s = replica.busy_s
    return replica


async def _settled(*replicas: Replica) -> None:
    """Wait until the replicas are idle."""
    for replica in replicas:
        before = -1.0
        while replica.busy_s - before > IDLE_SHARE_MAX * SETTLED_SECONDS:
            before = replica.busy_s
            await asyncio.sleep(SETTLED_SECONDS)


async def _measured(leader: Replica, follower: Replica, ends: int, empty_mib: float) -> Sequence[harness.Row]:
    name = f"{ends:,} finished jobs"
    memory = leader.mib, follower.mib
    seen = observations(MODELS)
    before = leader.busy_s, follower.busy_s
    for begin in range(0, len(seen), BATCH):
        await leader.observer.Observe(pb.ObserveRequest(observations=seen[begin : begin + BATCH]))
    await _settled(leader, follower)
    observing_us, reading_us = (
        (replica.busy_s - then) / len(seen) * 1e6 for replica, then in zip((leader, follower), before, strict=True)
    )
    asked = questions(MODELS)
    then = follower.busy_s
    for _ in range(ASKED):
        await follower.stub.Estimate(asked)
    answering_us = (follower.busy_s - then) / ASKED / MODELS * 1e6
    empty = "empty store"
    return [
        harness.Row(f"{name}: memory of who leads", memory[0], "MiB", empty_mib or memory[0], empty),
        harness.Row(f"{name}: memory of who follows", memory[1], "MiB", empty_mib or memory[0], empty),
        harness.Row(
            f"{name}: start and restore", follower.restoring_s, "s of processor", leader.restoring_s, "the leader"
        ),
        harness.Row(
            f"{name}: an observation read by who follows", reading_us, "µs", observing_us, "taken by the leader"
        ),
        harness.Row(f"{name}: a job estimated, of 8 candidates", answering_us, "µs"),
    ]


if __name__ == "__main__":
    harness.main(lambda quick: asyncio.run(_measure(quick)), __doc__ or "")
