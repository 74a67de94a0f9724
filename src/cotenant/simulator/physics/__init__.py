"""The simulated world: how fast jobs really run, what they report, and what fails.

Schedulers see only what they would see live. All of it is off by default; `docs/simulator-physics.md` explains for each
model what is measured, what is assumed, and where it does not hold. `world` combines the pieces.
"""
