"""Reproduction of five papers: a command for each, with our figures beside the published ones."""
