"""The live scheduling cycle: ordering, candidates, explanations, start forecasts and metrics."""
