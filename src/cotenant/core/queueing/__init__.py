"""Who runs next and who has to wait: the cycle, orders, victims, reservations and forecasts. Pure."""
