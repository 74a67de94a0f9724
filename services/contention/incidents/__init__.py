"""Incidents: the contention policy's decisions and their outcomes."""
