"""How fast a job runs and how long: curves, rate windows, losses, latencies and run times. Pure."""
