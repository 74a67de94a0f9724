"""The predictor's servicer, and its messages."""
