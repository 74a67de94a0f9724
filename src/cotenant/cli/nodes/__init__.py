"""Commands about nodes."""
