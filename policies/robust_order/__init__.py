"""The robust order of `borda-mlfq`: one Gittins index for all jobs, learned from jobs that ended."""
