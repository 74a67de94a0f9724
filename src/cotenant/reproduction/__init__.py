"""What five papers report, measured again: a command for each, our figures beside the published ones."""
