"""The node agent: one per server. It inventories the server and runs the attempts that placement assigns to it."""

from cotenant.telemetry import plain_structlog as plain_structlog  # first: modules of the agent import structlog
