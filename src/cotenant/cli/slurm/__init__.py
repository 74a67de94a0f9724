"""Slurm's commands as a façade over Cotenant: `sbatch`, `srun`, `squeue`, `scancel`, `sacct`, `sinfo`, `scontrol`."""
