"""Encoding and decoding between protobuf messages and the domain model."""
