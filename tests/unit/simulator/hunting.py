"""Searches for combinations that violate a law: `python -m tests.unit.simulator.hunting 2000 SEED audited,replayed`.

Reports each kind of failure once, with the smallest world found, and how many combinations were tried.
"""

from __future__ import annotations

import pickle
import random
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.unit.simulator import laws
from tests.unit.simulator.combinations import FOUND, OWN_ARMS, Case, cases

EXAMPLES_EACH = 4


class Hunt:
    """Tried combinations and findings so far."""

    def __init__(self, laws_held: list[str], folder: Path) -> None:
        self.laws, self.folder = laws_held, folder
        self.examples = 0
        self.tried: set[tuple[str, ...]] = set()
        self.found: dict[str, tuple[int, int]] = {}  # how often, and the size of the smallest world

    def combination(self, number: int, examples: int) -> None:
        """Try some worlds under one combination, drawn by a number."""
        chance = random.Random(number)
        names = {kind: chance.choice([plugin.name for plugin in found]) for kind, found in FOUND.items()}
        if chance.random() < 0.5:
            names["predictor"] = chance.choice(OWN_ARMS)
        else:
            names["predictor"] = ",".join(chance.sample([one.name for one in FOUND["predictor"]], chance.randint(1, 2)))

        @seed(number)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(names))
        def look(case: Case) -> None:
            self.examples += 1
            self.tried.add(case.combination)
            for name in self.laws:
                try:
                    getattr(laws, name)(case)
                except Exception as error:  # any failure is counted, and the search continues
                    self.note(name, case, error)

        look()

    def note(self, name: str, case: Case, error: Exception) -> None:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if "site-packages" not in one.filename]
        where = " ".join(f"{Path(one.filename).name}:{one.lineno}" for one in frames[-3:])
        what = f"{name} {type(error).__name__} {where}"
        often, size = self.found.get(what, (0, 10**9))
        if (now := len(case.jobs) * 10 + len(case.cluster.shapes)) < size:
            kept = self.folder / f"{zlib.crc32(what.encode())}.pickle"
            kept.write_bytes(pickle.dumps((name, case)))
            print(f"{what}\n  {str(error)[:400]}\n  {case.combination} → {kept}", flush=True)
        self.found[what] = often + 1, min(size, now)


def hunt() -> None:
    examples, number, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
    folder = Path(tempfile.mkdtemp(prefix="hunted-"))
    state = Hunt(names, folder)
    began = time.process_time()
    while state.examples < examples:
        state.combination(number, EXAMPLES_EACH)
        number += 1
    print(
        f"{state.examples} examples, {len(state.tried)} combinations, {time.process_time() - began:.0f} s of processor"
    )
    for what, (often, _) in state.found.items():
        print(f"  {often} × {what}")


if __name__ == "__main__":
    hunt()
