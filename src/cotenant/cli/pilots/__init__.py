"""`cotenant pilots`: agents in jobs of another system, as many as the waiting jobs ask for."""
