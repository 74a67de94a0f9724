"""The version of the policy API, in a module of its own so that discovery need not load what policies work on."""

from __future__ import annotations

API_VERSION = 1
