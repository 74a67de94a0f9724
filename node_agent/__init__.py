"""The agent: one per server, it finds what the server is made of and runs what placement assigns to it."""
