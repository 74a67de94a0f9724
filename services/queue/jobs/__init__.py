"""Job records: submission, state, transitions, storage, arrays, archive and retention."""
