"""Puts small errors into the code, one at a time, and counts how many of them the tests find.

Each mutant is tried against the tests of its module only: its own examples, those that import it and those of its
package; then against mypy. It is put in place as the module is imported, so no file changes. Without `--only`, mutants
are drawn from core and policies. Exits with 1 if less than 85% of them are found. A survivor is a law that no test
states, or changes nothing that anybody could notice.

    python -m tests.verification.mutation                                     100 mutants, half an hour at most
    python -m tests.verification.mutation --sample 400 --seed 7 --jobs 2      the same ones each time
    python -m tests.verification.mutation --only policies/las.py --sample 0   all mutants of a module
    python -m tests.verification.mutation --only src/cotenant/core/scheduling --json report/mutation.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from tests.support.paths import ROOT
from tests.verification.mutation.code_mutants import Mutant, mutants_of
from tests.verification.mutation.related_tests import Repository
from tests.verification.mutation.runner import TYPES, Result, TestsBroken, Verdict, failing_without_mutants, judge_all

DEFAULT = "src/cotenant/core,policies"
SAMPLE = 100
SHARE_MIN = 0.85
CONFIDENCE = 1.96  # standard deviations that hold in 95% of cases
PROGRESS_EVERY_SECONDS = 15.0


def main(arguments: Sequence[str]) -> int:
    """Run a sample of mutants; return 1 if too many survive, 2 if there are none or the tests cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.verification.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="draw the mutants of this seed; default: random")
    parser.add_argument(
        "--sample", type=_count, metavar="N", default=SAMPLE, help=f"number of mutants, 0 for all; {SAMPLE}"
    )
    parser.add_argument("--only", default=DEFAULT, metavar="PATH", help=f"files and folders, by commas; {DEFAULT}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel processes; one per core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the result")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if missing := missing_stubs(ROOT):
        print(f"error: {len(missing)} generated files are missing, {missing[0]} first", file=sys.stderr)
        print(
            "hint: run `make setup` in this checkout; without them every mutant would count as found", file=sys.stderr
        )
        return 2
    repository = Repository(ROOT)
    every = _all_mutants(repository, options.only.split(","))
    if not every:
        print(f"no mutants in {options.only}: give files or folders of modules, from {ROOT}", file=sys.stderr)
        return 2
    chosen = random.Random(seed).sample(every, min(options.sample or len(every), len(every)))
    print(f"seed {seed}; {len(chosen):,} of {len(every):,} mutants, {options.jobs} in parallel", flush=True)
    try:
        results = _judge(repository, chosen, options.jobs)
        wrong = failing_without_mutants(ROOT, [one.killer for one in results])
    except TestsBroken as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    share = _print_summary(results)
    if options.json:
        options.json.write_text(json.dumps(_document(seed, results, len(every)), indent=2))
    for test in wrong:
        print(f"error: {test} fails without any mutant", file=sys.stderr)
    return 2 if wrong else int(share < SHARE_MIN)


def missing_stubs(root: Path) -> list[str]:
    """Return the modules that are generated from the protos of a checkout but are not there."""
    names = (path.relative_to(root / "protos").with_suffix("") for path in sorted((root / "protos").rglob("*.proto")))
    stubs = (f"src/{name}_pb2.py" for name in names)
    return [stub for stub in stubs if not (root / stub).is_file()]


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, not {text}")
    return int(text)


def _all_mutants(repository: Repository, parts: Sequence[str]) -> list[Mutant]:
    """Return the mutants of all modules in some files and folders, which may be named through symbolic links."""
    folders = [(ROOT / part).resolve() for part in parts if part]
    found: list[Mutant] = []
    for path in sorted(repository.modules.values()):
        file = ROOT / path
        if any(file.is_relative_to(folder) for folder in folders):
            found += mutants_of(file.read_text(), path)
    return found


def _judge(repository: Repository, mutants: Sequence[Mutant], jobs: int) -> list[Result]:
    results: list[Result] = []
    begun = shown = time.monotonic()
    with closing(judge_all(repository, mutants, jobs)) as coming:
        for one in coming:
            results += [one] if one else []
            if one and one.verdict is Verdict.SURVIVED:
                print(f"\nsurvived: {one.mutant.path}:{one.mutant.line}", flush=True)
                print(one.mutant.diff((ROOT / one.mutant.path).read_text()), end="", flush=True)
            if results and time.monotonic() - shown > PROGRESS_EVERY_SECONDS:
                shown = time.monotonic()
                print(_progress(results, len(mutants), shown - begun), file=sys.stderr, flush=True)
    return results


def _progress(results: Sequence[Result], total: int, seconds: float) -> str:
    """Return how far a run is.

    >>> _progress([Result(Mutant("a.py", 0, 1, "", 1), Verdict.KILLED)], 3, 30)
    '  … 1 of 3 mutants, 0 survived; 2.0 a minute, about 60 s left'
    """
    survived = sum(one.verdict is Verdict.SURVIVED for one in results)
    left_seconds = seconds / len(results) * (total - len(results))
    pace = f"{60 * len(results) / seconds:,.1f} a minute, about {left_seconds:,.0f} s left"
    return f"  … {len(results):,} of {total:,} mutants, {survived} survived; {pace}"


def wilson(found: int, total: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share (Wilson, JASA 1927).

    >>> [round(end, 3) for end in wilson(85, 100)], [round(end, 3) for end in wilson(10, 10)]
    ([0.767, 0.907], [0.722, 1.0])
    """
    share, square = found / total, CONFIDENCE**2
    middle = share + square / (2 * total)
    width = CONFIDENCE * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, (middle - width) / (1 + square / total)), min(1.0, (middle + width) / (1 + square / total))


def _share(results: Sequence[Result]) -> float:
    """Return the share of mutants that were found: killed, or so slow that nobody could overlook it."""
    return sum(one.verdict is not Verdict.SURVIVED for one in results) / len(results)


def _print_summary(results: Sequence[Result]) -> float:
    counts, share = Counter(one.verdict for one in results), _share(results)
    low, high = wilson(len(results) - counts[Verdict.SURVIVED], len(results))
    by_types = sum(one.killer == TYPES for one in results)
    verdicts = (
        f"{counts[Verdict.KILLED]} killed, {by_types} of them by mypy, {counts[Verdict.TIMEOUT]} timed out, "
        f"{counts[Verdict.SURVIVED]} survived"
    )
    print(f"\n{verdicts}: {share:.0%} of {len(results)} found ({low:.0%} to {high:.0%}), {SHARE_MIN:.0%} required")
    return share


def _document(seed: int, results: Sequence[Result], mutants: int) -> dict[str, object]:
    """Return the result as JSON."""
    counts = Counter(one.verdict for one in results)
    return {
        "seed": seed,
        "mutants": mutants,
        "tried": len(results),
        **{verdict.value: counts[verdict] for verdict in Verdict},
        "share_found": _share(results),
        "confidence_interval": wilson(len(results) - counts[Verdict.SURVIVED], len(results)),
        "results": [asdict(one) | {"diff": one.mutant.diff((ROOT / one.mutant.path).read_text())} for one in results],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
