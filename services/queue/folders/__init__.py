"""Uploaded folders as the queue keeps them."""
