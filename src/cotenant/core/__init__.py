"""The domain: models, policy protocols and decisions. No clock, network or randomness: time and rng are arguments."""
