"""Where a gang may go: packing, topology, devices and constraints. Pure."""
