"""Cotenant: deep-learning training, inference and CPU jobs together on one shared GPU cluster."""
