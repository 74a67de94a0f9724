"""What the façade's commands agree on: how Slurm's notions are kept in a job."""

KILL_WAIT_SECONDS = 30  # between the signal at the time limit and the kill, as Slurm's KillWait
TERMINATE = "SIGTERM"
QUEUE = "default"
COMMENT = "comment"  # the label that keeps `--comment`
BATCH_ARGUMENTS = 10  # of batch.sh before the script's own: sh -c TEXT NAME, then its eight
