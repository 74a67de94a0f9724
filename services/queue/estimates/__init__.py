"""Predictions of jobs: asking for estimates, refreshing them, and sending observations."""
