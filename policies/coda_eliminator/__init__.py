"""CODA's contention eliminator (Zhao et al., ICDCS 2020)."""
