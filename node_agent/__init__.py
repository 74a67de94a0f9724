"""The node agent: one per server. It inventories the server and runs the attempts that placement assigns to it."""
