"""Agents' sessions: the messages to and from one agent."""
