"""The command line: `cotenant`."""
