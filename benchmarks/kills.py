"""Random kills of agents, supervisors, jobs and the control plane, each followed by a restart, under load.

Every process is real: queue, placement and predictor on SQLite files, two agents, and jobs in control groups. A
printed seed determines what is killed and when; the interleaving is up to the kernel. The checks: no job was lost; no
core or GPU was ever owned twice, according to placement's history and to locks that the jobs hold; and no process,
control group or directory is left behind.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.kill_mesh import (  # noqa: E402 - likewise
    SERVICES,
    KillMesh,
    Submitter,
    Target,
    find_violations,
    wait_until_done,
)

KILLS, KILLS_QUICK = 1_000, 40
MIXES = (  # what is killed together, and its weight
    (("job",), 40),
    (("supervisor",), 36),
    (("agent",), 6),
    (("placement",), 3),
    (("queue",), 3),
    (("predictor",), 1),
    (("agent", "supervisor"), 4),
    (("agent", "job"), 3),
    (("agent", "placement"), 2),
    (("placement", "queue", "supervisor"), 1),
    (("agent", "agent", "placement", "queue", "predictor"), 1),
)
UNFINISHED = 24
JOB_SECONDS = (0.05, 0.6)
PAUSE_SECONDS_MAX = 0.3
LIFE_SECONDS_MAX = 0.4
REPORT_EVERY = 50
WHILE_STARTING = 0.15  # probability of killing a process that does not serve yet
TARGET_SECONDS_MAX = 3.0
LAST_SECONDS_MAX = 420.0
KEPT = ROOT / "report" / "kills"


def run(
    kills: int,
    seed: str,
    directory: Path,
    *,
    broken: str = "",
    unfinished: int = UNFINISHED,
    patience_seconds: float = LAST_SECONDS_MAX,
) -> tuple[KillMesh, Submitter, list[str]]:
    """Kill `kills` processes; return the mesh, its submitter, and all violations."""
    rng = Random(seed)
    cpus = sorted(os.sched_getaffinity(0))
    half = max(1, len(cpus) // 2)
    nodes = {"n1": cpus[:half], "n2": cpus[half:]}
    mesh = KillMesh(directory, {name: ",".join(map(str, some)) for name, some in nodes.items() if some}, broken)
    submitter = Submitter(mesh, Random(f"{seed} jobs"), unfinished, JOB_SECONDS)
    for part in mesh.parts:
        mesh.start(part)
    submitter.start()
    begin, next_report = time.monotonic(), REPORT_EVERY
    try:
        while (done := mesh.kills.total()) < kills:
            if done >= next_report:
                print(
                    f"{done} kills, {len(submitter.acknowledged)} jobs, {time.monotonic() - begin:.0f} s",
                    file=sys.stderr,
                )
                next_report += REPORT_EVERY
            time.sleep(rng.uniform(0, PAUSE_SECONDS_MAX))
            mesh.restart_ended()
            (mix,) = rng.choices([mix for mix, _ in MIXES], [weight for _, weight in MIXES])
            for what in mix:
                kill(mesh, what, rng)
    except KeyboardInterrupt:
        print("interrupted; checking what was recorded so far", file=sys.stderr)
    finally:
        submitter.stop()
        wait_until_done(mesh, submitter.acknowledged, patience_seconds)
        wait_until_acknowledged(mesh)
        mesh.stop()
    return mesh, submitter, find_violations(mesh, submitter.acknowledged)


def kill(mesh: KillMesh, what: str, rng: Random) -> None:
    """Kill one process of a kind, if there is any."""
    if what in ("job", "supervisor"):
        if target := wait_for_target(mesh, what, rng):
            time.sleep(rng.uniform(0, LIFE_SECONDS_MAX))  # at a random time of its life, or too late
            mesh.kills[what] += target.kill()
        return
    part = what if what in SERVICES else rng.choice(sorted(mesh.nodes))
    if mesh.is_up(part) or rng.random() < WHILE_STARTING:
        mesh.kill(part)


def wait_for_target(mesh: KillMesh, what: str, rng: Random) -> Target | None:
    """Return a process of an attempt, waiting a moment for one; restarting services need that time as well."""
    deadline = time.monotonic() + TARGET_SECONDS_MAX
    while not (target := mesh.target(what, rng)) and time.monotonic() < deadline:
        mesh.restart_ended()
        time.sleep(0.02)
    return target


def wait_until_acknowledged(mesh: KillMesh, seconds: float = 20.0) -> None:
    """Wait until all ends are committed and acknowledged to the agents."""
    deadline = time.monotonic() + seconds
    while any(mesh.state_dir.glob("nodes/*/attempts/*")) and time.monotonic() < deadline:
        mesh.restart_ended()
        time.sleep(0.05)


def measure(quick: bool) -> Sequence[harness.Row]:
    """Kill processes, wait until all jobs have ended, and check what was recorded."""
    seed, kills = os.environ.get("COTENANT_SEED", "kills"), KILLS_QUICK if quick else KILLS
    kills = int(os.environ.get("COTENANT_KILLS", kills))
    print(f"seed {seed!r}, {kills} kills", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        begin = time.monotonic()
        mesh, submitter, violations = run(kills, seed, Path(place) / "mesh")
        took_seconds = time.monotonic() - begin
        journal = mesh.journal()
        if violations:
            shutil.copytree(mesh.directory, KEPT, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "held"))
            print(f"records are kept in {KEPT}", file=sys.stderr)
    for line in violations[:50]:
        print(line, file=sys.stderr)
    lost = [line for line in violations if "is lost or" in line or "never ran" in line]
    twice = [line for line in violations if "twice:" in line or "is owned" in line or "times" in line]
    left = [line for line in violations if "left" in line]
    jobs, attempts = len(submitter.acknowledged), len({tuple(words[1:3]) for words in journal})
    return [
        harness.Row("kills", mesh.kills.total(), "", bar=f">= {kills}", holds=mesh.kills.total() >= kills),
        *(harness.Row(f"kills of {what}", count, "") for what, count in sorted(mesh.kills.items())),
        harness.Row("jobs that were acknowledged", jobs, ""),
        harness.Row("attempts that began", attempts, "", jobs, "jobs"),
        harness.Row("commits of placement that were checked", mesh.history.revisions, ""),
        harness.Row("jobs lost", len(lost), "", bar="0", holds=not lost),
        harness.Row("owned or started twice", len(twice), "", bar="0", holds=not twice),
        harness.Row("processes, groups and files left", len(left), "", bar="0", holds=not left),
        harness.Row("all that was wrong", len(violations), "", bar="0", holds=not violations),
        harness.Row(
            "time", took_seconds, "s", bar="<= 60" if quick else "", holds=took_seconds <= 60 if quick else None
        ),
    ]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
