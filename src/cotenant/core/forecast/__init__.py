"""Start forecasts: the scheduling cycle, played forward. Pure."""
