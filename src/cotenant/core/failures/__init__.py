"""Failure classification: the class of a failure, who is responsible, and whether the job is retried. Pure."""
