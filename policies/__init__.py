"""Policies: one decision and one file each, found through entry points and never imported by name."""
