"""Runs the node agent's tests on virtual machines unlike this computer: `make test-vm`.

Each machine is started under QEMU with a kernel of its own, control groups of version 2 and several NUMA nodes.
Arguments that are not options of this program are passed to pytest inside: `make test-vm ARGS="-k numa"`. Paths of
tests among them replace the tests that the machine would run.

    python -m tools.vm                                   all machines, all tests
    python -m tools.vm --machine siblings -k resize      one machine, some tests
    python -m tools.vm --machine one-socket --sh 'lscpu' a command instead of the tests
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.vm import layers
from tools.vm.host import EMULATOR, Distribution, Unable, distribution, have
from tools.vm.machine import Machine, Shape, new_disk, results
from tools.vm.session import session

REPORTS = layers.ROOT / "report" / "vm"
PATIENCE = 10.0  # factor for timeouts compared to bare metal
TEST_SECONDS_MAX = 120
STATE_MIB, SYSTEM_MIB = 256, 4096  # sizes of sparse disks
MARKS = "root and not speed"  # tests that depend on the kernel
NONE_SELECTED = 5  # pytest's exit status
INSIDE = """\
export LANG=C.UTF-8 HOME=/root PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin GRPC_VERBOSITY=ERROR CI=1
export COTENANT_MACHINE={machine} COTENANT_PATIENCE={patience} COTENANT_PERSISTENT=/persistent
export COTENANT_TEST_NODE=test-node
mkdir -p /results
cd /srv/cotenant
{{ {command}; }} >/dev/vport0p1 2>&1
echo $? >/results/status
tar -C /results -c . >/dev/vport0p2
{afterwards}
"""
POWER_CUT = "sleep 1; echo b >/proc/sysrq-trigger; sleep 60"
POWER_OFF = "systemctl poweroff"


@dataclass(frozen=True, slots=True)
class Visit:
    """One boot of a machine: its shape, the tests that run on it, and how it ends.

    `goes_on` keeps the disk of the previous visit; `cut` cuts the power while jobs run. With `systemd`, systemd is the
    machine's first process, everything written stays on the disk, and a package index is in /opt/wheels.
    """

    name: str
    shape: Shape
    tests: tuple[str, ...]
    goes_on: bool = False
    cut: bool = False
    systemd: bool = False


# Tests among those that do not depend on the kernel, or would repeat others.
AGENT, MACHINES = "tests/unit/node_agent", "tests/verification/machines"
ANYWHERE = ("bad_disks", "link", "profiling", "systemd_scope", "run_as")
AGAIN = "test_resizing.py::test_an_agent_killed_during_a_change_restores_its_record"
FIRST_VERSION = (
    "test_resizing.py::test_a_change_that_the_kernel_refuses_is_rolled_back"  # of control groups, which refuses it
)
TIMED = (  # depend only on the agent's own clocks and records
    "test_silence_releases_the_attempt",
    "test_the_loss_of_contention_releases_the_attempt",
    "test_the_next_agent_knows_the_throttles_of_a_killed_one",
    "test_the_jobs_trace_contains_its_throttles",
)


def _with_mark(folder: str, mark: str) -> list[str]:
    """Return the test files of a folder that use a mark; collecting the others only to deselect them takes long."""
    paths = sorted((layers.ROOT / folder).rglob("test_*.py"))
    return [str(path.relative_to(layers.ROOT)) for path in paths if f"pytest.mark.{mark}" in path.read_text()]


AGENT_TESTS = (
    *(path for path in _with_mark(AGENT, "root") if Path(path).stem.removeprefix("test_") not in ANYWHERE),
    *(f"--deselect={AGENT}/{AGAIN}[{moment}]" for moment in ("replace_assignment", "answer")),
    f"--deselect={AGENT}/{FIRST_VERSION}",
    *(f"--deselect={AGENT}/control/test_throttle_directives.py::{name}" for name in TIMED),
)

VISITS = (
    Visit("two-sockets", Shape(2, 2), (*AGENT_TESTS, MACHINES)),
    Visit(
        "siblings",
        Shape(2, 1, threads=2),
        (f"{MACHINES}/test_siblings.py", f"{MACHINES}/reboot/before.py"),
        cut=True,
    ),
    Visit("one-socket", Shape(1, 2), (f"{MACHINES}/reboot/after.py",), goes_on=True),
    Visit("systemd", Shape(1, 4, node_mib=2048), (f"{MACHINES}/systemd/installed.py",), systemd=True),
    Visit(
        "systemd-again",
        Shape(1, 4, node_mib=2048),
        (f"{MACHINES}/systemd/started.py",),
        goes_on=True,
        systemd=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Made:
    """What machines are started with: the folder of a kernel, and layers."""

    kernel: Path
    base: Path
    project: Path
    wheels: Path | None

    def layers(self, visit: Visit, top: Path) -> list[Path]:
        """Return the layers of a visit, the lowest first."""
        return [self.base, *((self.wheels,) if visit.systemd and self.wheels else ()), self.project, top]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a visit."""

    visit: Visit
    status: int
    counts: dict[str, int]
    seconds: float


def main() -> int:
    """Run the requested tests; return 0 if every test passed."""
    options, pytest_words = _parser().parse_known_args()
    start = time.monotonic()
    try:
        if platform.machine() != "x86_64":
            raise Unable("the machines are x86-64 and use this computer's packages; hint: run it on an x86-64 computer")
        have(EMULATOR, "start machines")
        cache = layers.Cache(options.cache, fresh=options.fresh)
        system = distribution()
        visits = [visit for visit in VISITS if not options.machine or visit.name in options.machine]
        made = _made(cache, system, visits)
        print(f"   ready in {time.monotonic() - start:.0f} s, with {options.accelerator}", flush=True)
        with tempfile.TemporaryDirectory(prefix="cotenant-vm-") as scratch:
            return _visit_all(visits, made, options, pytest_words, Path(scratch))
    except (Unable, subprocess.CalledProcessError) as error:
        print(f"test-vm: {error}", file=sys.stderr)
        return 2


def _made(cache: layers.Cache, system: Distribution, visits: Sequence[Visit]) -> Made:
    base = layers.base(cache, system)
    python = (base / "python").read_text()
    wheels = layers.wheels(cache, python) / "image" if any(visit.systemd for visit in visits) else None
    project = layers.project(cache, python) / "image"
    return Made(layers.kernel(cache, system), base / "image", project, wheels)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tools.vm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cotenant-vm"
    names = [visit.name for visit in VISITS]
    parser.add_argument("--machine", choices=names, action="append", help="run only this machine; may be repeated")
    parser.add_argument("--sh", metavar="COMMAND", default="", help="run this command inside instead of the tests")
    parser.add_argument("--accelerator", choices=["kvm", "tcg"], default="tcg", help="QEMU accelerator (%(default)s)")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="factor for timeouts (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="rebuild everything with the newest packages")
    parser.add_argument("--cache", type=Path, default=cache, help="directory of cached builds (%(default)s)")
    parser.add_argument("--seconds-max", type=float, default=1800, help="stop a machine after this time")
    return parser


def _visit_all(
    visits: Sequence[Visit],
    made: Made,
    options: argparse.Namespace,
    pytest_words: Sequence[str],
    scratch: Path,
) -> int:
    chains = _chains(visits)
    width = max(len(visit.name) for visit in visits) if len(chains) > 1 else 0
    with ThreadPoolExecutor(len(chains)) as pool:
        rounds = pool.map(lambda chain: _visit_in_turn(chain, made, options, pytest_words, scratch, width), chains)
        return _report([outcome for outcomes in rounds for outcome in outcomes])


def _chains(visits: Sequence[Visit]) -> list[list[Visit]]:
    """Return visits grouped by disk: visits with one disk run in order, the groups in parallel."""
    chains: list[list[Visit]] = []
    for visit in visits:
        if visit.goes_on and chains:
            chains[-1].append(visit)
        else:
            chains.append([visit])
    return chains


def _visit_in_turn(
    visits: Sequence[Visit],
    made: Made,
    options: argparse.Namespace,
    pytest_words: Sequence[str],
    scratch: Path,
    width: int,
) -> list[Outcome]:
    outcomes = []
    disk = new_disk(scratch / f"disk-{visits[0].name}", SYSTEM_MIB if visits[0].systemd else STATE_MIB)
    for visit in visits:
        place = scratch / visit.name
        place.mkdir()
        tests = _tests(visit, pytest_words)
        top = session(place, _script(visit, options, tests), tests)
        machine = Machine(visit.shape, made.kernel, made.layers(visit, top), disk, options.accelerator, visit.systemd)
        outcomes.append(_visit(visit, machine, options.seconds_max, width))
        top.unlink()
    return outcomes


def _tests(visit: Visit, pytest_words: Sequence[str]) -> list[str]:
    """Return pytest's arguments: those of the command line, and unless they name tests, the visit's tests."""
    named = any(word.startswith("tests/") for word in pytest_words)
    return [*pytest_words, *(() if named else visit.tests)]


def _script(visit: Visit, options: argparse.Namespace, tests: Sequence[str]) -> str:
    words = ["python3", "-u", "-m", "pytest", "-p", "no:cacheprovider", "-v", "-r", "fER", "--durations=8"]
    words += [
        "-m",
        MARKS,
        "-o",
        f"timeout={TEST_SECONDS_MAX * options.patience}",
        "--junitxml=/results/junit.xml",
    ]
    command = options.sh or shlex.join([*words, *tests])
    afterwards = POWER_OFF if visit.systemd else POWER_CUT if visit.cut and not options.sh else ""
    return INSIDE.format(machine=visit.name, patience=options.patience, command=command, afterwards=afterwards)


def _visit(visit: Visit, machine: Machine, seconds_max: float, width: int) -> Outcome:
    shape = visit.shape
    print(f"\n── {visit.name}: {shape.sockets} sockets × {shape.cores} cores × {shape.threads} threads", flush=True)
    start, place = time.monotonic(), REPORTS / visit.name
    for line in machine.run(place, seconds_max):
        print(f"{visit.name:<{width}} {line}" if width else line, flush=True)
    left = results(place)
    return Outcome(visit, int((left / "status").read_text()), _counts(left / "junit.xml"), time.monotonic() - start)


def _counts(junit: Path) -> dict[str, int]:
    if not junit.exists():
        return {}
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None
    return {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}


def _report(outcomes: Sequence[Outcome]) -> int:
    """Print a summary; return the exit status of the first failed visit."""
    print()
    for outcome in outcomes:
        counts = ", ".join(f"{count} {name}" for name, count in outcome.counts.items())
        print(f"   {outcome.visit.name:<12}{outcome.seconds:6.0f} s  {counts}", flush=True)
    statuses = [outcome.status for outcome in outcomes]
    failures = [status for status in statuses if status not in (0, NONE_SELECTED)]
    if failures:
        return failures[0]
    return 0 if 0 in statuses else NONE_SELECTED


if __name__ == "__main__":
    sys.exit(main())
