"""Nodes' samples: decoding and buffering."""
