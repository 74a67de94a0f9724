"""Contention's servicer, and directives on their way to agents."""
