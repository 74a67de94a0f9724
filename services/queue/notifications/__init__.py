"""Notifications about jobs: what is due, when to try, and the senders."""
