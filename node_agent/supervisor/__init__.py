"""The supervisor of one attempt: a process that outlives the agent and imports next to nothing."""
