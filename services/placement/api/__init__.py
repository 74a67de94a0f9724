"""Placement's servicers, and the decoding of requests."""
