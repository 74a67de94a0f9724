"""Estimates of jobs: requests, refreshes, profiling, and observations sent to the predictor."""
