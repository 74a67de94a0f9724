"""The version of the policy API, alone, so that who only looks for policies need not load what they work on."""

from __future__ import annotations

API_VERSION = 1
