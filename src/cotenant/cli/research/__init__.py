"""Commands for research: simulate, compare, predict, reproduce."""
