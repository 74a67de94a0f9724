"""Faults of the simulated world, drawn from its seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from tests.verification.control_plane.simulated_rpc import SLOW_SECONDS_MAX, SLOW_SHARE
from tests.verification.control_plane.virtual_time import Process
from tests.verification.control_plane.world import REPLICAS, World

from cotenant.fail_points import POINTS

Faults = tuple[tuple[Callable[[World], Awaitable[None]], int], ...]  # the fault and its relative frequency
FAIL_POINT_SECONDS_MAX = 4.0
STOPPED_SECONDS, RUNNING_SECONDS, STUTTER_SECONDS_MAX = (0.05, 3.0), 0.2, 6.0
LAG_SECONDS = (0.05, 0.5)
JUMP_SECONDS = (0.5, 2.0, 30.0, 3600.0)
WATCHES = 20
SERVERS = tuple(name for names in REPLICAS.values() for name in names)


def _replica(world: World) -> str:
    """Draw a replica, preferably a leader: faults of followers rarely have effects."""
    leaders = sorted(filter(None, (world.leader(service) for service in REPLICAS)))
    return world.rng.choice(leaders if leaders and world.rng.random() < 0.6 else SERVERS)


async def crash(world: World) -> None:
    """Kill a replica, and restart it after a while."""
    name = _replica(world)
    world.faults[-1] += f" {name}"
    if world.processes[name].dead:
        return
    await world.kill(name)
    await asyncio.sleep(world.rng.random() * 2)
    world.start(name)


async def pause(world: World) -> None:
    """Pause a replica for a while, often for longer than its lease, and resume it."""
    name = _replica(world)
    world.faults[-1] += f" {name}"
    process = world.processes[name]
    process.pause()
    await asyncio.sleep(world.rng.random() * 5)
    process.resume()


async def lose_store(world: World) -> None:
    """Disconnect all processes from the store."""
    world.store.away = True
    await asyncio.sleep(world.rng.random() * 3)
    world.store.away = False


async def disconnect_from_store(world: World) -> None:
    """Disconnect one replica from the store."""
    name = _replica(world)
    world.faults[-1] += f" {name}"
    await _disconnect(world, name, world.rng.random() * 5)


async def _disconnect(world: World, name: str, seconds: float) -> None:
    store = world.stores[name]
    store.reached = False
    await asyncio.sleep(seconds)
    store.reached = True


async def lose_answers(world: World) -> None:
    """Lose transactions and their answers."""
    name = _replica(world)
    world.faults[-1] += f" {name}"
    store = world.stores[name]
    store.losing = 0.3
    await asyncio.sleep(world.rng.random() * 3)
    store.losing = 0.0


async def partition(world: World) -> None:
    """Disconnect two parts from each other."""
    pair = frozenset(world.rng.sample([*SERVERS, *world.agents], 2))
    world.faults[-1] += f" {' '.join(sorted(pair))}"
    world.network.cut.add(pair)
    await asyncio.sleep(world.rng.random() * 5)
    world.network.cut.discard(pair)


async def lose_agent(world: World) -> None:
    """Stop an agent and restart it; its attempts keep running."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    agent = world.agents[name]
    await agent.stop()
    agent.leave()
    await asyncio.sleep(world.rng.random() * 4 if world.rng.random() < 0.8 else 8.0)
    if agent.is_stopped() and not agent.is_off:
        agent.start()


async def reboot(world: World) -> None:
    """Reboot a node: all its attempts end."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    agent = world.agents[name]
    await agent.stop()
    agent.leave()
    agent.reboot()
    await asyncio.sleep(world.rng.random())
    if agent.is_stopped() and not agent.is_off:
        agent.start()


async def lose_node(world: World) -> None:
    """Switch a node off, and let an operator forget it; later another node joins under its name."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    agent = world.agents[name]
    if agent.is_stopped():
        return
    agent.is_off = True
    await agent.stop()
    agent.leave()
    agent.reboot()
    await world.forget_node(name)
    await asyncio.sleep(world.rng.random() * 2)
    agent.is_off = False
    agent.start()


async def repeat_frames(world: World) -> None:
    """Redeliver orders to an agent, perhaps from a deposed placement."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    for _ in range(5):
        world.agents[name].redeliver()
        await asyncio.sleep(world.rng.random() / 2)


async def repeat_calls(world: World) -> None:
    """Redeliver calls, as if a proxy had been paused; their callers have sent others since."""
    for _ in range(4):
        world.network.redeliver()
        await asyncio.sleep(world.rng.random())


async def repeat_plans(world: World) -> None:
    """Redeliver plans."""
    for _ in range(8):
        world.network.redeliver("/PlanPlacement")
        await asyncio.sleep(world.rng.random() / 2)


async def _at_fail_point(world: World, action: Callable[[Process], None], name: str = "", point: str = "") -> str:
    """Act on a replica when it next reaches a fail point; return its name, "" if it does not get there."""
    name = name or _replica(world)
    service = name.partition("-")[0]
    kinds = (service, "election", *(("array",) if service == "queue" else ()))
    points = [one for one in POINTS if one.partition(".")[0] in kinds]
    point = point or world.rng.choice(points)
    world.faults[-1] += f" {name} at {point}"
    came = asyncio.Event()

    def meet(process: Process) -> None:
        action(process)
        came.set()

    world.armed[name, point] = meet
    try:
        async with asyncio.timeout(FAIL_POINT_SECONDS_MAX):
            await came.wait()
    except TimeoutError:
        world.armed.pop((name, point), None)
        return ""
    return name


async def cut_off(world: World) -> None:
    """Kill a replica at a fail point, and restart it after a while."""
    if name := await _at_fail_point(world, Process.cut):
        await world.kill(name)
        await asyncio.sleep(world.rng.random() * 2)
        world.start(name)


async def halt(world: World) -> None:
    """Pause a replica at a fail point, often for longer than its lease."""
    if name := await _at_fail_point(world, Process.pause):
        process = world.processes[name]
        await asyncio.sleep(world.rng.random() * 5)
        process.resume()


async def stutter(world: World) -> None:
    """Stop and resume a replica or an agent repeatedly, for less or for more than a lease."""
    name = _replica(world) if world.rng.random() < 0.7 else world.rng.choice(sorted(world.agents))
    stopped_seconds = world.rng.uniform(*STOPPED_SECONDS)
    world.faults[-1] += f" {name} {stopped_seconds:.2f} s"
    until = world.loop.time() + world.rng.random() * STUTTER_SECONDS_MAX
    while world.loop.time() < until:
        process = world.processes[name]
        process.pause()
        await asyncio.sleep(stopped_seconds)
        process.resume()
        await asyncio.sleep(RUNNING_SECONDS)


async def starve(world: World) -> None:
    """Slow down all messages of a replica or an agent, without stopping it."""
    name = _replica(world) if world.rng.random() < 0.7 else world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    world.network.lags[name] = world.rng.uniform(*LAG_SECONDS)
    await asyncio.sleep(world.rng.random() * 5)
    world.network.lags.pop(name, None)


async def black_hole(world: World) -> None:
    """Kill a replica, and put a server in its place that accepts calls and answers none, until it restarts."""
    name = _replica(world)
    world.faults[-1] += f" {name}"
    if world.processes[name].dead:
        return
    await world.kill(name)
    world.mute(name)
    await asyncio.sleep(world.rng.random() * 5)
    world.start(name)


async def slow_store(world: World) -> None:
    """Slow down all requests to the store."""
    world.store.lag_seconds = world.rng.uniform(*LAG_SECONDS)
    await asyncio.sleep(world.rng.random() * 5)
    world.store.lag_seconds = 0.0


async def fill_store(world: World) -> None:
    """Let the store answer reads, and refuse to grow."""
    world.store.full = True
    await asyncio.sleep(world.rng.random() * 5)
    world.store.full = False


async def jump_clocks(world: World) -> None:
    """Jump the wall clock of one process forward or back, perhaps several times; it is never corrected."""
    name = _replica(world) if world.rng.random() < 0.7 else world.rng.choice(sorted(world.agents))
    for _ in range(world.rng.randint(1, 4)):
        by_seconds = world.rng.choice(JUMP_SECONDS) * world.rng.choice((1, -1))
        world.faults[-1] += f" {name} {by_seconds:+g} s"
        world.processes[name].clock_seconds += by_seconds
        await asyncio.sleep(world.rng.random())


async def hold_watches(world: World) -> None:
    """Open watches that are never read."""
    await world.clients.hold_watches("greedy", WATCHES, world.rng.random() * 5)


async def close_node(world: World) -> None:
    """Drain or cordon a node for a while, as an operator."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    await world.close_node(name, world.rng.random() * 4, drain=world.rng.random() < 0.6)


LAUNCH_PROBLEMS = (
    "memory control group: Read-only file system",
    "the agent's directory: No space left on device",
    "cannot fork: Resource temporarily unavailable",
    "too many open files",
    "no such user: carol",
)


async def refuse_launches(world: World) -> None:
    """Let a node refuse launches for a while; it is up and reports."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    world.agents[name].refusing = world.rng.choice(LAUNCH_PROBLEMS)
    await asyncio.sleep(world.rng.random() * 6)
    world.agents[name].refusing = ""


async def slow_down(world: World) -> None:
    """Slow down a share of all messages."""
    world.network.slow_share, world.network.slow_seconds_max = 0.3, 3.0
    await asyncio.sleep(world.rng.random() * 3)
    world.network.slow_share, world.network.slow_seconds_max = SLOW_SHARE, SLOW_SECONDS_MAX


async def replace_queue(world: World) -> None:
    """Kill the queue's leader, and keep the next one from hearing about running attempts for a while."""
    if not (name := world.leader("queue")):
        return
    pairs = {frozenset((queue, placement)) for queue in REPLICAS["queue"] for placement in REPLICAS["placement"]}
    world.network.cut |= pairs
    await world.kill(name)
    await asyncio.sleep(world.rng.random())
    world.start(name)
    await asyncio.sleep(2 + world.rng.random() * 3)
    world.network.cut -= pairs


FAULTS: Faults = (
    (crash, 3),
    (cut_off, 4),
    (pause, 3),
    (halt, 4),
    (slow_down, 2),
    (lose_store, 2),
    (disconnect_from_store, 2),
    (lose_answers, 3),
    (partition, 2),
    (lose_agent, 2),
    (reboot, 1),
    (lose_node, 1),
    (repeat_frames, 3),
    (repeat_calls, 3),
    (close_node, 2),
    (replace_queue, 1),
    (refuse_launches, 2),
)


async def depose(world: World) -> None:
    """Depose the queue's leader: it hears from everything but the store, and so does not learn of it."""
    if name := world.leader("queue"):
        await _disconnect(world, name, 4 + 4 * world.rng.random())


async def cut_off_in_commit(world: World) -> None:
    """Kill the queue's leader before it stores what it has heard of an attempt."""
    if (name := world.leader("queue")) and await _at_fail_point(world, Process.cut, name, "queue.committing"):
        await world.kill(name)
        world.start(name)


async def replace_placement(world: World) -> None:
    """Kill placement's leader: the next one knows nothing of attempts that were forgotten."""
    if name := world.leader("placement"):
        await world.kill(name)
        await asyncio.sleep(world.rng.random())
        world.start(name)


ALL_FAULTS: Faults = (*FAULTS, (depose, 2), (cut_off_in_commit, 2), (replace_placement, 2), (repeat_plans, 3))
ALL_FAULTS_SHARE, KINDS_MIN, KINDS_MAX = 0.25, 2, 5


def draw_faults(seed: int) -> Faults:
    """Draw the kinds of faults for a seed: mostly a few, repeatedly, because many kinds mask each other.

    As in swarm testing (Groce et al., ISSTA 2012 [P]).
    """
    rng = Random(f"faults {seed}")
    return (
        ALL_FAULTS
        if rng.random() < ALL_FAULTS_SHARE
        else tuple(rng.sample(ALL_FAULTS, rng.randint(KINDS_MIN, KINDS_MAX)))
    )


PAUSE_FAULTS: Faults = ((pause, 2), (halt, 3))
REPLACED_QUEUE_FAULTS: Faults = ((depose, 3), (cut_off_in_commit, 3), (crash, 1))
LATE_PLAN_FAULTS: Faults = ((replace_placement, 2), (repeat_plans, 5))
LOST_NODE_FAULTS: Faults = ((lose_node, 3), (lose_agent, 3), (repeat_calls, 3))
NEW_QUEUE_FAULTS: Faults = ((replace_queue, 1),)
SICK_NODE_FAULTS: Faults = ((refuse_launches, 1),)


async def inject_faults(world: World, faults: Faults | None = None) -> None:
    """Inject a fault every second or so; faults may overlap."""
    faults = faults or draw_faults(world.seed)
    world.clocks_jump = any(fault is jump_clocks for fault, _ in faults)
    under_way: list[asyncio.Task[None]] = []
    until = world.loop.time() + world.size.trouble_seconds
    while world.loop.time() < until:
        await asyncio.sleep(world.rng.expovariate(1 / world.size.pause_seconds))
        (fault,) = world.rng.choices([fault for fault, _ in faults], [weight for _, weight in faults])
        world.faults.append(f"{world.loop.time():.3f} {fault.__name__}")
        under_way.append(asyncio.create_task(_run_fault(fault, world)))
    await asyncio.gather(*under_way)


async def _run_fault(fault: Callable[[World], Awaitable[None]], world: World) -> None:
    await fault(world)


async def no_faults(world: World) -> None:
    """Inject no faults."""
    await asyncio.sleep(world.size.trouble_seconds)
