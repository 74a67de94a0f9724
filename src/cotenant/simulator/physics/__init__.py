"""What happens to jobs in the simulated world: how fast they really run, what they report, and what breaks.

Schedulers see only what they would see live. All of it is off unless it is asked for; `docs/simulator-physics.md` tells
for each model what is measured, what is assumed, and where it does not hold. `world` puts the pieces together.
"""
