"""Clusters of simulations, from a shorthand or a file."""
