"""Recorded histories of a mesh, and a checker of its invariants; pure except for reading records."""
