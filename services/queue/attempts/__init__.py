"""What becomes of attempts: watching placement, failures, retries, migration and pre-runs."""
