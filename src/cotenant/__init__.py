"""Cotenant: a scheduler for deep-learning training, inference and CPU jobs on a shared GPU cluster."""
