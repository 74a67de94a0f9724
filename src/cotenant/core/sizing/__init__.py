"""How many cores a running job holds: resizes, the spare cores lent out, and the search for the right count. Pure."""
