"""Real programs for the demo's jobs: each is a script that runs like any user's job."""
