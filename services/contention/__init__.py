"""Contention: samples of what jobs on a node do to each other, and what is done about it."""
