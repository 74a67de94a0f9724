"""Which jobs are profiled, and what was measured."""
