"""GENIE's placement: every objective is kept, the neighbours' too (Chen et al., TPDS 2020)."""
