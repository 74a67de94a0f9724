"""What was recorded of a mesh, and a check of what must never have been true: pure but for the reading of records."""
