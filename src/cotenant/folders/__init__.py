"""Uploaded folders: how they are cut into chunks and pages, and how chunks are kept on disk."""
