"""Commands for the mesh: run it, secure it, inspect it, back it up."""
