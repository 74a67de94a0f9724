"""The domain: words, protocols and decisions. No clock, no network, no chance: time and rng are arguments."""
