"""Contention on a node: who is hurt, by whom, and how the one that hurts is held back."""
