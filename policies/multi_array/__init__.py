"""CODA's multi-array scheduler (Zhao et al., ICDCS 2020)."""
