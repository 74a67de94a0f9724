"""Compares, cycle by cycle, what a live mesh decides with what a simulation of its snapshot decides."""

from __future__ import annotations

from tests.verification.decisions.simulated import first_decision
from tests.verification.decisions.world import World

CYCLES = 6  # of each world


async def differences(seed: int) -> list[str]:
    """Return how the decisions of one random world differ; nothing if they are the same."""
    world = World(seed)
    found: list[str] = []
    try:
        await world.start()
        for cycle in range(CYCLES):
            await world.step()
            snapshot = await world.snapshot()
            simulated, live = first_decision(snapshot), await world.decide()
            if simulated != live:
                found.append(
                    f"seed {seed}, cycle {cycle} ({world.description}):\n  live {live}\n  simulated {simulated}"
                )
    finally:
        await world.close()
    return found
