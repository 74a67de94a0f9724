"""Where a gang may go: packing, topology, arrays, cores by id, and what neighbours do to each other. Pure."""
