"""The scheduling cycle, live: ordering, reasons, start forecasts and autoscaling."""
