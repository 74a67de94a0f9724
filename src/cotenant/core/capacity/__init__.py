"""What is free on each node: the ledger, and counts and totals over it."""
