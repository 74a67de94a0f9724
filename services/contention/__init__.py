"""The contention service: detects jobs that slow each other down on a node, and throttles the suspects."""
