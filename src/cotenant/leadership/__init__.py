"""Replicas of a service: leader election, fencing, forwarding to the leader, store caches."""
