"""Running attempts: events, tracking, resizes and CPU rebalancing."""
