"""Several processes of one service: who of them leads, how the others pass on what only the leader can answer."""
