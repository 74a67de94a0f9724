"""Commands about the mesh: run it, secure it, look at it, back it up."""
