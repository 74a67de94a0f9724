"""Placement: owns nodes, allocations and assignments; commits each decision in one transaction."""
