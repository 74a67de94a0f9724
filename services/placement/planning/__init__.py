"""Plans: deciding, reserving, committing, forecasting."""
