"""What is free on which node: the ledger, and counts and totals over it."""
