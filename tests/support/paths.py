"""Where the repository and its folders are, whichever folder a test stands in."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SHARED_DATA = ROOT.parent / "shared" / "data"  # traces that only some checkouts have beside them: tests skip without
