"""Nodes come and go: registration, liveness, drains, removal."""
