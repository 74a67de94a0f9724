"""The public read calls, answered from what Slurm says."""
