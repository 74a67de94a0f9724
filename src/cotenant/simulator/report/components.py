"""What reports share with pages of the dashboard: the script of their tables, allowed by its hash and nothing else."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from markupsafe import Markup

SCRIPT = Path(__file__).parents[2] / "web" / "static" / "tables.js"


def parts() -> dict[str, Markup]:
    """Return the values that both templates need: the script, and the policy that allows this one alone."""
    text = SCRIPT.read_text(encoding="utf-8")
    allowed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {
        "script": Markup(text),  # ours
        "policy": Markup(f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"),
    }
