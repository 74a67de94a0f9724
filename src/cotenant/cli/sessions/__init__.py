"""Commands that work inside jobs: interactive jobs, a command in a running job, its ports."""
