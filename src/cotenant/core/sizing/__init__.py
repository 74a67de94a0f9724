"""How many cores and replicas a job holds: resizes, spare cores, core search, replica sizing. Pure."""
