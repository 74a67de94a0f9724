"""A sidecar on a node of Slurm: it moves running steps to the cores that they need."""
