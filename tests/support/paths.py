"""Paths of the repository and its folders."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SHARED_DATA = ROOT.parent / "shared" / "data"  # traces that only some checkouts have: tests skip without them
