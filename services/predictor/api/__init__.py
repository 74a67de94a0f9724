"""The predictor's servicer and the encoding of its messages."""
