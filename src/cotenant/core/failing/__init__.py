"""What kind of failure ended an attempt, whose matter it is, and whether the job is tried again."""
