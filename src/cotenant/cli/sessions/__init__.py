"""Commands that work inside running jobs: run a command there, reach its ports."""
