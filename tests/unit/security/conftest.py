"""Fixtures of tests that call a server."""

from tests.unit.rpc.conftest import mesh as mesh
