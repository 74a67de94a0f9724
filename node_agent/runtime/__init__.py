"""Runs attempts as processes: launch, cores, users, output, orphans."""
