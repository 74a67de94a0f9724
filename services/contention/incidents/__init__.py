"""Incidents: what the contention policy decides, and what became of it."""
