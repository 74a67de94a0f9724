"""Recordings of simulations: events, files, replay."""
