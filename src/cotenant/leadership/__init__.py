"""Several processes of one service: election, fencing, forwarding to the leader, store caches."""
