"""A real torchrun job is resized 1 → 3 → 2 on three agents: `make test-torch` installs torch and runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from tests.end_to_end.commands import Serving
from tests.end_to_end.meshes import Mesh, configured_mesh, end_all, start_agent
from tests.end_to_end.waiting import lines_of, until
from tests.support.paths import ROOT

from cotenant.core.model.lifecycle import Phase

TORCH = ROOT / ".cotenant" / "torch" / "bin"
START_SECONDS = 120.0  # each process imports torch

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(600),
    pytest.mark.group("torch"),
    pytest.mark.skipif(not (TORCH / "torchrun").exists(), reason="`make test-torch` installs torch"),
]

CONFIG = """
gpus = "fake:1"
allocator = "marginal-gain"
[options.allocator]
interval_seconds = "0"
"""

# What a user writes: one torchrun for each replica. torchrun sets RANK and WORLD_SIZE of its own workers.
LAUNCH = (
    'exec "$0" --nnodes="$WORLD_SIZE" --node-rank="$RANK" --nproc-per-node=1 '
    '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"'
)

# Distributed data parallel over gloo: 48 samples in each step, divided among the workers. The order of steps, and so
# the loss curve, is that of one worker, but for rounding.
PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

saved, losses = sys.argv[1] + ".checkpoint", sys.argv[1] + ".losses"
stop = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(48, 64)
targets = inputs @ torch.randn(64, 1)
model = DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
step = 0
if os.path.exists(saved):
    state = torch.load(saved)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); step = state["step"]
while True:
    loss = torch.nn.functional.mse_loss(model(inputs[rank::world]), targets[rank::world])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    step += 1
    total = loss.detach() / world
    dist.all_reduce(total)
    if rank == 0:
        print("step", step, flush=True)
        with open(losses, "a") as file:
            print(step, world, f"{total.item():.9f}", file=file)
    told = stop.clone()
    dist.all_reduce(told)  # all stop after the same step
    if told:
        break
    time.sleep(0.02)
if rank == 0:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, saved + ".new")
    os.replace(saved + ".new", saved)
dist.barrier()
dist.destroy_process_group()
"""


MEASURED = re.compile(r"a resize costs it [\d.]+ s \(median of 2\): [\d.]+ s to stop, [\d.]+ s until new steps")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """A mesh with one node of one GPU."""
    with configured_mesh(tmp_path, CONFIG) as mesh:
        yield mesh


def curve(work: Path) -> list[tuple[int, int, float]]:
    """Return the step, the number of workers and the loss of each step, as rank 0 wrote them."""
    lines = map(str.split, lines_of(work.with_suffix(".losses")))
    return [(int(step), int(world), float(loss)) for step, world, loss in lines]


def wait_for_steps(work: Path, workers: int, count: int = 5) -> None:
    """Wait until a number of workers has made some steps."""
    until(
        lambda: sum(world == workers for _, world, _ in curve(work)) >= count,
        f"steps of {workers} workers",
        seconds=START_SECONDS,
    )


def test_the_loss_curve_of_a_torchrun_job_goes_on_over_resizes(mesh: Mesh, tmp_path: Path) -> None:
    one, work, program = ("--gpus", "1", "--cpus", "1"), tmp_path / "work", tmp_path / "train.py"
    program.write_text(PROGRAM)
    with ExitStack() as stack:
        agents: dict[str, Serving] = {}

        def start(name: str) -> None:
            agents[name] = start_agent(mesh, name, 1)
            stack.callback(agents[name].kill)

        start("second")
        start("third")
        first = mesh.cli.submit(*one, "--replicas", "2", "--", "sleep", "1000")
        mesh.client.wait_for(first, Phase.RUNNING)
        elastic = mesh.cli.submit(
            *one, "--replicas", "1..3", "--resize", "restart", "--grace", "60s",
            "--progress-regex", r"step (\d+)", "--", "/bin/sh", "-c", LAUNCH, TORCH / "torchrun", program, work,
        )  # fmt: skip
        wait_for_steps(work, 1)
        mesh.client.cancel(first)
        wait_for_steps(work, 3)

        agents["second"].kill()  # its worker runs on
        start("second")
        known = len(curve(work))
        until(lambda: len(curve(work)) > known + 5, "steps after an agent was killed")
        assert mesh.client.job(elastic).attempt.number == 2

        rigid = mesh.cli.submit(*one, "--", "sleep", "1000")
        mesh.client.wait_for(rigid, Phase.RUNNING, seconds=START_SECONDS)
        wait_for_steps(work, 2)
        cost = until(lambda: MEASURED.search(mesh.cli("explain", elastic).out.replace("\n", " ")), "its measured cost")
        assert cost
        job = mesh.client.job(elastic)
        end_all(mesh.client)
        assert [agent.terminate() for agent in agents.values()] == [0, 0]

    print(cost[0])
    steps, worlds, losses = zip(*curve(work), strict=True)
    assert list(dict.fromkeys(worlds)) == [1, 3, 2]
    assert steps == tuple(range(1, len(steps) + 1))  # none is lost, and none is made twice
    assert all(after < before * 1.02 for before, after in pairwise(losses)), losses
    assert (job.attempt.number, job.failures, job.preemptions) == (3, 0, 0)
