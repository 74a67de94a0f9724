"""Policies: one decision, one file each; found through entry points, never imported by name."""
