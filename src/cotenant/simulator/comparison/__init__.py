"""Comparison of arms: the same trace on the same cluster under different choices."""
