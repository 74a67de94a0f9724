"""The predictor: how fast and how long jobs will run, and how sure that is."""
