"""Checks of Cotenant on a machine with a real GPU; see docs/gpu.md."""
