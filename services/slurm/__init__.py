"""The bridge to Slurm: answers Cotenant's read calls from what Slurm says, and changes nothing unless it is told to."""
