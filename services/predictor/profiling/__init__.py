"""Profiling: which jobs are profiled, and the measured rates."""
