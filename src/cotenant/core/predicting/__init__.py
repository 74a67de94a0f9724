"""How fast a job runs and how long: curves, windows of rates, losses, latencies and run times. Pure."""
