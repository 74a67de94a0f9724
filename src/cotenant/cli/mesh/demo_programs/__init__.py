"""Real programs for the demo's jobs: each is a script of its own, run as any user's job is."""
