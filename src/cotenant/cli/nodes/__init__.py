"""Commands for nodes."""
