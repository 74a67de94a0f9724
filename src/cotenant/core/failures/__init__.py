"""What kind of failure ended an attempt, who is responsible, and whether the job is retried. Pure."""
