"""What befalls a world, drawn from its seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.control_plane.world import REPLICAS, TROUBLE_PAUSE_SECONDS, TROUBLE_SECONDS, World

SERVERS = tuple(name for names in REPLICAS.values() for name in names)


async def crash(world: World) -> None:
    """A replica is killed, and started again after a while."""
    name = world.rng.choice(SERVERS)
    world.faults[-1] += f" {name}"
    if world.processes[name].dead:
        return
    await world.kill(name)
    await asyncio.sleep(world.rng.random() * 2)
    world.start(name)


async def pause(world: World) -> None:
    """A replica gets no time for a while, often longer than its lease lasts, and goes on as if nothing had been."""
    name = world.rng.choice(SERVERS)
    world.faults[-1] += f" {name}"
    process = world.processes[name]
    process.pause()
    await asyncio.sleep(world.rng.random() * 5)
    process.resume()


async def lose_store(world: World) -> None:
    """The store is away for all."""
    world.store.away = True
    await asyncio.sleep(world.rng.random() * 3)
    world.store.away = False


async def lose_way_to_store(world: World) -> None:
    """One replica does not reach the store; others reach it."""
    name = world.rng.choice(SERVERS)
    world.faults[-1] += f" {name}"
    store = world.stores[name]
    store.reached = False
    await asyncio.sleep(world.rng.random() * 5)
    store.reached = True


async def lose_answers(world: World) -> None:
    """Transactions and their answers are lost."""
    name = world.rng.choice(SERVERS)
    world.faults[-1] += f" {name}"
    store = world.stores[name]
    store.losing = 0.3
    await asyncio.sleep(world.rng.random() * 3)
    store.losing = 0.0


async def partition(world: World) -> None:
    """Two parts do not hear each other."""
    pair = frozenset(world.rng.sample([*SERVERS, *world.agents], 2))
    world.faults[-1] += f" {' '.join(sorted(pair))}"
    world.network.cut.add(pair)
    await asyncio.sleep(world.rng.random() * 5)
    world.network.cut.discard(pair)


async def lose_agent(world: World) -> None:
    """An agent ends, and is started again; what it ran runs on."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    agent = world.agents[name]
    await agent.stop()
    agent.leave()
    await asyncio.sleep(world.rng.random() * 4 if world.rng.random() < 0.8 else 8.0)
    if agent.is_stopped():
        agent.start()


async def reboot(world: World) -> None:
    """A node loses all that runs on it."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    agent = world.agents[name]
    await agent.stop()
    agent.leave()
    agent.reboot()
    await asyncio.sleep(world.rng.random())
    if agent.is_stopped():
        agent.start()


async def repeat_frames(world: World) -> None:
    """An agent hears once more what was said before, perhaps by a placement that leads no more."""
    name = world.rng.choice(sorted(world.agents))
    world.faults[-1] += f" {name}"
    for _ in range(5):
        world.agents[name].hear_again()
        await asyncio.sleep(world.rng.random() / 2)


FAULTS: tuple[tuple[Callable[[World], Awaitable[None]], int], ...] = (
    (crash, 5),
    (pause, 5),
    (lose_store, 2),
    (lose_way_to_store, 2),
    (lose_answers, 3),
    (partition, 2),
    (lose_agent, 2),
    (reboot, 1),
    (repeat_frames, 3),
)


async def trouble(world: World) -> None:
    """Let something befall the world every second or so; several things may be so at once."""
    under_way: list[asyncio.Task[None]] = []
    until = world.loop.time() + TROUBLE_SECONDS
    while world.loop.time() < until:
        await asyncio.sleep(world.rng.expovariate(1 / TROUBLE_PAUSE_SECONDS))
        (fault,) = world.rng.choices([fault for fault, _ in FAULTS], [weight for _, weight in FAULTS])
        world.faults.append(f"{world.loop.time():.3f} {fault.__name__}")
        under_way.append(asyncio.create_task(_one(fault, world)))
    await asyncio.gather(*under_way)


async def _one(fault: Callable[[World], Awaitable[None]], world: World) -> None:
    await fault(world)


async def peace(world: World) -> None:
    """Nothing befalls it."""
    await asyncio.sleep(TROUBLE_SECONDS)
