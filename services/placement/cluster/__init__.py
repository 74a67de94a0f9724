"""Nodes and attempts as placement knows them, and every write of them."""
