"""Contention's servicer and the queues of directives to agents."""
