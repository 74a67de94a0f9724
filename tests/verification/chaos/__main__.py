"""Runs a mesh of real processes under injected faults: `make chaos ARGS="--steps 1000 --seed 7 --keep DIR"`.

Three members of etcd, two processes of each service and five agents, each on a separate machine (kernel namespaces, so
root is required), and users who submit and cancel jobs. The seed determines which faults happen, and when. From time to
time all faults end; once all jobs have ended, the recorded history is checked.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end import remains
from tests.support.etcd_server import etcd_binary
from tests.verification.chaos import driver, machines
from tests.verification.chaos.broken import BROKEN
from tests.verification.chaos.plan import DEFAULT, DRAWN, REGRESSIONS, Fault

STEPS, REST_EVERY = 60, 25
WRONG_SHOWN = 20
TLS_SHARE, NAMES_SHARE = 0.5, 0.5
INIT = "--init"  # the first process of the namespaces


def main(arguments: Sequence[str]) -> int:
    """Run, or explain why chaos cannot run here; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"number of faults that have an effect; {STEPS}")
    parser.add_argument("--seed", type=int, help="repeat the plan of this seed; default: random")
    parser.add_argument(
        "--rest-every",
        type=int,
        default=REST_EVERY,
        help=f"steps between checks at rest; {REST_EVERY}",
    )
    parser.add_argument("--pace", type=float, default=1.0, help="factor for the pauses between steps; 1")
    parser.add_argument("--keep", type=Path, help="directory for logs and recorded histories")
    parser.add_argument("--only", type=_faults, default=DEFAULT, help=f"draw only these faults, of {', '.join(Fault)}")
    parser.add_argument(
        "--only-fail-point", type=_points, default=DRAWN, help="arm only these fail points (names: docs/proof.md)"
    )
    parser.add_argument(
        "--broken", choices=["", *BROKEN], default="", help="run a deliberately broken build, which must be detected"
    )
    parser.add_argument(
        "--tls", action=argparse.BooleanOptionalAction, help="use TLS between all parts; default: by seed"
    )
    parser.add_argument(
        "--names", action=argparse.BooleanOptionalAction, help="use host names instead of addresses; default: by seed"
    )
    parser.add_argument("--lasting", type=float, help="share of faults that last until `status` must name them")
    parser.add_argument("--regressions", action="store_true", help="also restore an older store, or start an empty one")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    if why := machines.missing_tools() or ("" if etcd_binary() else "etcd is not installed: apt install etcd-server"):
        print(f"chaos cannot run here: {why}", file=sys.stderr)
        return 0
    if directory := machines.own_directory():
        return _run(options, directory)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"ended by a signal, {signal.SIGTERM}"))
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        return machines.run_inside([sys.executable, "-m", "tests.verification.chaos", INIT, *arguments], directory)
    finally:
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for path in (*directory.glob("logs/*"), *(path for path in directory.iterdir() if path.is_file())):
                shutil.copy(path, options.keep)
        remains.remove(remains.groups_of_nodes(directory.name))
        shutil.rmtree(directory)


def _faults(text: str) -> frozenset[Fault]:
    try:
        return frozenset(map(Fault, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; faults are {', '.join(Fault)}") from None


def _points(text: str) -> tuple[str, ...]:
    if unknown := [name for name in text.split(",") if name not in DRAWN]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: never reached; points are {', '.join(DRAWN)}")
    return tuple(text.split(","))


def _run(options: argparse.Namespace, directory: Path) -> int:
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    tls = random.Random(f"tls {seed}").random() < TLS_SHARE if options.tls is None else options.tls
    names = random.Random(f"names {seed}").random() < NAMES_SHARE if options.names is None else options.names
    how = f"{'with' if tls else 'without'} TLS, {'with' if names else 'without'} names"
    print(f"seed {seed}, {options.steps} steps, {how}", flush=True)
    log = functools.partial(print, flush=True)
    points = options.only_fail_point
    faults = options.only | REGRESSIONS if options.regressions else options.only
    wanted = driver.RunOptions(
        seed,
        options.steps,
        options.rest_every,
        faults,
        options.broken,
        tls,
        options.pace,
        points,
        names,
        options.lasting,
    )
    outcome = driver.run(directory, wanted, log)
    _print(outcome)
    if options.json:
        options.json.write_text(json.dumps(vars(outcome)))
    return int(bool(outcome.wrong))


def _print(outcome: driver.RunResult) -> None:
    faults = ", ".join(
        f"{outcome.faults.get(fault, 0)} of {count} × {fault}" for fault, count in sorted(outcome.drawn.items())
    )
    rest = f"{outcome.settling_seconds:.0f} s of it at rest"
    drawn = sum(outcome.drawn.values())
    print(f"{outcome.steps} of {drawn} steps had an effect, in {outcome.seconds:.0f} s ({rest}): {faults}")
    print(
        f"{outcome.jobs} jobs, {outcome.attempts} attempts, {outcome.commits} commits, {outcome.edges} other events, "
        f"{outcome.starts} starts of parts, {outcome.garbled} frames garbled"
    )
    print(f"requests and stops: {', '.join(f'{count} × {name}' for name, count in sorted(outcome.done.items()))}")
    named = ", ".join(f"{count} × {what}" for what, count in sorted(outcome.named.items())) or "no lasting faults"
    slowest = ", ".join(f"{fault} {seconds:.0f} s" for fault, seconds in sorted(outcome.named_seconds.items()))
    print(f"status: {named}; slowest: {slowest or 'none'}; healthy again within {outcome.well_seconds:.0f} s")
    print(f"{'fail point':24}{'armed':>8}{'reached':>10}{'killed or stopped':>18}")
    for point, (armed, passed, fired) in sorted(outcome.points.items()):
        print(f"{point:24}{armed:8}{passed:10}{fired:18}{'' if passed else '  never reached'}")
    print(f"failed calls that were retried: {outcome.refusals}")
    for what in outcome.wrong[:WRONG_SHOWN]:
        print(f"wrong: {what}")
    if outcome.wrong:
        print(f"{len(outcome.wrong)} errors; to repeat: make chaos ARGS='--seed {outcome.seed}'")


if __name__ == "__main__":
    if machines.own_directory() and sys.argv[1:2] == [INIT]:
        sys.exit(machines.be_init([sys.executable, "-m", "tests.verification.chaos", *sys.argv[2:]]))
    sys.exit(main(sys.argv[1:]))
