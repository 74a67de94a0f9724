"""Generates the measured speeds that the simulator bundles from the files that Synergy and Gavel publish.

    python tools/bundle_profiles.py SYNERGY.json GAVEL.json

Synergy: `cpu_mem_sensitivity_profiles.json`; Gavel: `simulation_throughputs.json`. Redundant rows and
columns are left out, and pairs of jobs on more than one GPU.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "src" / "cotenant" / "simulator" / "data"
MEMORY_GB = (20.83, 62.5, 125.0, 187.5, 250.0)
TYPES = ("k80", "p100", "v100")


def main() -> None:
    """Read both files and write both tables."""
    synergy, gavel = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    _write("synergy_cores.json", _synergy(synergy))
    _write("gavel_speeds.json", _gavel(gavel))


def _synergy(profiles: dict[str, Any]) -> dict[str, Any]:
    """Return speeds relative to 3 cores by model and GPUs: a row per core count, a column per memory size."""
    models: dict[str, Any] = {}
    for profile in profiles.values():
        family = profile["name"].rpartition("_")[0]
        models.setdefault(family, {})[str(profile["gpus"])] = profile["tput"]
    return {"cores": [1, 2, 3, 4, 5, 6, 9, 12, 24], "memory_gb": MEMORY_GB, "models": dict(sorted(models.items()))}


def _gavel(types: dict[str, Any]) -> dict[str, Any]:
    alone: dict[str, Any] = {}
    for text in types["v100"]:
        name, scale = _key(text)
        rates = [[_rate(types, kind, text), _rate(types, f"{kind}_unconsolidated", text)] for kind in TYPES]
        alone.setdefault(name, {})[str(scale)] = rates
    names = sorted(alone)
    pairs = {kind: [[_slowdown(types[kind], mine, other) for other in names] for mine in names] for kind in TYPES}
    return {"types": TYPES, "steps_per_second": alone, "names": names, "pairs": pairs}


def _key(text: str) -> tuple[str, int]:
    name, scale = ast.literal_eval(text)
    return re.sub(r" \(batch size (\d+)\)", r"/\1", name), scale


def _rate(types: dict[str, Any], kind: str, text: str) -> float | None:
    rate = types[kind].get(text, {}).get("null")
    return float(f"{rate:.4g}") if rate else None


def _slowdown(jobs: dict[str, Any], mine: str, other: str) -> float | None:
    """Return the speed left to a job that shares a GPU with another; None if not measured or if both do not fit."""
    by_name = {_key(text): rates for text, rates in jobs.items()}
    rates = by_name[mine, 1]
    pair = next((pair for text, pair in rates.items() if text != "null" and _key(text) == (other, 1)), None)
    return round(pair[0] / rates["null"], 3) if pair and pair[0] > 0 else None


def _write(name: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, separators=(",", ":"))
    (DATA / name).write_text(re.sub(r'(?<=[\]}]),"', ',\n"', text) + "\n")


if __name__ == "__main__":
    main()
