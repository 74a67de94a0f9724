"""Compares the default profile with every other one on each paper's kind of work.

python -m tests.verification.profiles --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
import sys

from tests.verification.profiles.workloads import WORKLOADS, behind, ratios

from cotenant.core.policy.profiles import DEFAULT, PROFILES


def main() -> int:
    """Print the median and the range of each ratio; return 1 if the default is behind anywhere."""
    parser = argparse.ArgumentParser(prog="python -m tests.verification.profiles", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--only", default="", help="workloads whose paper's profile contains this")
    options = parser.parse_args()
    others = [name for name in PROFILES if name != DEFAULT]
    lost = 0
    print(f"average JCT of {DEFAULT} ÷ that of …: median (least to most of {options.seeds} seeds)")
    for workload in WORKLOADS:
        if options.only not in workload.profile:
            continue
        found = ratios(workload, others, range(1, options.seeds + 1))
        print(f"{workload.name} ({workload.profile})")
        worse = behind(found)
        for other, values in found.items():
            mark = "  BEHIND" if other in worse else ""
            print(
                f"  {other:14} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}){mark}",
                flush=True,
            )
        lost += len(worse)
    return int(lost > 0)


sys.exit(main())
