"""The policy API: protocols, options and what policies see of a cluster."""
