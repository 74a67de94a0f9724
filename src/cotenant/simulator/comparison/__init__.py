"""Comparing arms: the same trace on the same cluster, with other choices."""
