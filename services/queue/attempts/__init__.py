"""Attempts: watching placement, failures, retries, migration and pre-runs."""
