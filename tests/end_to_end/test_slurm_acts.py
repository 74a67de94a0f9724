"""What the bridge changes in a real Slurm: cores at submission, and the order of pending jobs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.end_to_end.commands import COTENANT, Cli, Serving, environment_of
from tests.end_to_end.waiting import until
from tests.support.slurm_cluster import CONTROLLER, SlurmCluster, missing_for_slurm, slurm_cluster

from cotenant.cli.mesh.slurm_acts import script

pytestmark = [
    pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm() or "Slurm is there"),
    pytest.mark.group("slurm-acts"),
]

QUIET = ("-o", "/dev/null")
TRAIN = (*QUIET, "-J", "train", "--gres=gpu:1")
RATES = {"1": [0.01, 0.01], "2": [0.02], "4": [0.04], "8": [0.04], "3": [0.03]}  # of jobs with θ = 4


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm with the script, which reads `table` in its folder."""
    with slurm_cluster(2, lua=script(Path("/@RUN@/table")).replace("/@RUN@", "@RUN@")) as cluster:
        yield cluster


@pytest.fixture
def empty(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The Slurm without a job before and after."""
    yield slurm
    slurm.call("scancel", "--user=root")
    until(lambda: not slurm.call("squeue", "-h").strip(), "no job is left")


def table(*rows: str, age_seconds: int = 0, explicit: int = 0, memory: int = 0, dry: int = 0) -> str:
    """Return a table with these rows."""
    now = int(time.time()) - age_seconds
    return "\n".join((f"cotenant-cores\t1\t{now}\t600\t{explicit}\t{memory}\t{dry}", *rows, "end", ""))


ROW = "0\tmain\t1\ttrain\t6\t1\t90\t6 cores"


def cpus(slurm: SlurmCluster, *options: str) -> int:
    """Submit a held job; return its CPUs."""
    job = slurm.submit("sleep 900", "-H", *options)
    found = re.search(r"NumCPUs=(\d+)", slurm.call("scontrol", "-o", "show", "job", job))
    assert found
    return int(found[1])


def test_a_submission_gets_the_cores_of_the_table(empty: SlurmCluster) -> None:
    (empty.directory / "table").write_text(table(ROW))
    assert cpus(empty, *TRAIN) == 6
    assert "AdminComment=cotenant: cpus 1 -> 6: 6 cores" in empty.call("scontrol", "show", "job")
    assert cpus(empty, *QUIET, "-J", "train", "--gpus=a100:1", "-p", "main") == 6
    assert cpus(empty, *TRAIN, "--array=0-3") == 6
    ran = empty.directory / "ran"
    ran.unlink(missing_ok=True)
    job = empty.submit(f"echo $SLURM_CPUS_ON_NODE $(srun bash -c 'echo $SLURM_CPUS_ON_NODE') > {ran}", *TRAIN)
    empty.wait_for_state(job, "COMPLETED")
    assert ran.read_text().split() == ["6", "6"]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("-c2",), 2),  # its user knows
        (("--cpus-per-gpu=2",), 1),  # Slurm counts them when it starts
        (("--mincpus=2",), 1),
        (("--gres=gpu:2",), 1),
        (("-J", "other"), 1),
        (("-n2",), 2),
        (("-N2",), 2),
        (("--mem-per-cpu=100",), 1),
    ],
)
def test_other_submissions_are_left_alone(empty: SlurmCluster, options: tuple[str, ...], count: int) -> None:
    (empty.directory / "table").write_text(table(ROW))
    assert cpus(empty, *TRAIN, *options) == count


def test_named_cpus_are_changed_where_told_and_the_time_limit_has_room(empty: SlurmCluster) -> None:
    (empty.directory / "table").write_text(table(ROW, explicit=1))
    assert [cpus(empty, *TRAIN, f"-c{count}") for count in (2, 8)] == [6, 6]
    assert [cpus(empty, *TRAIN, "-c8", "-t", minutes) for minutes in ("1", "2")] == [8, 6]


def test_only_jobs_that_name_their_memory_where_it_follows_cpus(empty: SlurmCluster) -> None:
    (empty.directory / "table").write_text(table(ROW, memory=1))
    assert [cpus(empty, *TRAIN, *options) for options in ((), ("--mem=100",))] == [1, 6]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        table(ROW).removesuffix("end\n"),
        table(ROW).replace("cotenant-cores\t1", "cotenant-cores\t2"),
        table("0\tmain\t1\ttrain\tmany\t1\t90\t"),
        table("0\tmain\t1\ttrain\t-3\t1\t90\t", "0\tmain"),
        table(ROW, *[f"{n}\tmain\t1\ttrain\t6\t1\t90\t{'x' * 300}" for n in range(1, 4000)]),
        table(ROW, age_seconds=700),
        table(ROW, age_seconds=-7200),
        table(ROW, dry=1),
    ],
    ids=["empty", "garbage", "cut", "newer", "words", "negative", "large", "old", "future", "dry"],
)
def test_a_bad_table_changes_nothing(empty: SlurmCluster, text: str) -> None:
    (empty.directory / "table").write_text(text)
    assert cpus(empty, *TRAIN) == 1


def test_a_missing_table_changes_nothing(empty: SlurmCluster) -> None:
    path = empty.directory / "table"
    path.unlink(missing_ok=True)
    assert cpus(empty, *TRAIN) == 1
    path.mkdir()
    assert cpus(empty, *TRAIN) == 1
    path.rmdir()


@dataclass
class Acting:
    """A bridge that acts, with its own home."""

    slurm: SlurmCluster
    cli: Cli
    home: Path
    serving: Serving | None = None

    def start(self, *options: str) -> Serving:
        """Start the bridge; return when it has read Slurm."""
        log = self.home / "bridge.log"
        fixed = ("--listen", "127.0.0.1:0", "--interval", "500ms")
        self.serving = self.cli.start("serve", "slurm", *fixed, *options, log=log)
        line = self.serving.wait_for_output("slurm serves at ")
        self.cli.environment["COTENANT_ENDPOINT"] = line.split()[3].rstrip(":")
        until(lambda: not self.status().returncode, "the first picture")
        return self.serving

    def status(self) -> subprocess.CompletedProcess[str]:
        """Return the answer of `status`."""
        return subprocess.run(
            [COTENANT, "status", "--json"], env=self.cli.environment, capture_output=True, text=True, check=False
        )

    def factors(self) -> dict[str, int]:
        """Return the SiteFactors of the pending jobs."""
        lines = self.slurm.call("sprio", "-h", "-o", "%i %S").splitlines()
        return {job: int(factor) for job, factor in (line.split() for line in lines)}


@pytest.fixture
def acting(empty: SlurmCluster, tmp_path: Path) -> Iterator[Acting]:
    """A bridge beside a Slurm without jobs, not started."""
    environment = environment_of(tmp_path, SLURM_CONF=str(empty.directory / "slurm.conf"))
    environment["COTENANT_STATE_DIR"] = str(tmp_path / "state")
    made = Acting(empty, Cli(environment), tmp_path)
    yield made
    if made.serving:
        made.serving.terminate()


def test_what_was_learned_reaches_submissions_until_the_bridge_ends(acting: Acting) -> None:
    state, path = acting.home / "state", acting.slurm.directory / "table"
    state.mkdir()
    history = {"version": 1, "kinds": [[0, "main", 1, "train", RATES]]}
    (state / "slurm-runs.json").write_text(json.dumps(history))
    serving = acting.start("--act", "cores", "--cores-table", str(path))
    until(path.exists, "the table")
    assert cpus(acting.slurm, *TRAIN) == 4
    job = acting.slurm.submit("sleep 900", *TRAIN)
    acting.slurm.wait_for_state(job, "RUNNING")
    shown = until(lambda: _summary(acting, job), "the job is explained")
    assert "cotenant: cpus 1 -> 4: 4 cores: more cores gain less than 5%" in shown
    acting.slurm.call("scancel", job)
    serving.terminate()
    acting.serving = None
    assert not path.exists()
    assert cpus(acting.slurm, *TRAIN) == 1


def _summary(acting: Acting, job: str) -> str:
    found = subprocess.run(
        [COTENANT, "explain", "--json", job],
        env=acting.cli.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if found.returncode else str(json.loads(found.stdout)["summary"])


def submit_waiting(slurm: SlurmCluster) -> dict[str, str]:
    """Submit jobs that wait for whole nodes, the longest first; return their ids by name."""
    running = slurm.submit("sleep 900", *QUIET, "-N2", "--exclusive", "-t", "60")
    slurm.wait_for_state(running, "RUNNING")
    whole = (*QUIET, "-N2", "--exclusive")
    jobs = {
        "long": slurm.submit("sleep 900", *whole, "-t", "600"),
        "array": slurm.submit("sleep 900", *whole, "-t", "100", "--array=0-4%2"),
        "short": slurm.submit("sleep 900", *whole, "-t", "5"),
        "held": slurm.submit("sleep 900", *whole, "-t", "1", "-H"),
    }
    slurm.call("sbatch", *QUIET, "-N2", "--exclusive", "-t", "1", ":", "-N1", "--wrap", "sleep 900")
    return jobs


@pytest.mark.deep
def test_pending_jobs_are_ordered_and_stay_so(acting: Acting) -> None:
    jobs = submit_waiting(acting.slurm)
    serving = acting.start("--act", "order")

    def order() -> list[str]:
        factors = acting.factors()
        named = [job for job, factor in sorted(factors.items(), key=lambda one: -one[1]) if factor]
        return [next(name for name, number in jobs.items() if number == job) for job in named]

    until(lambda: order() == ["short", "array", "long"], "the order of expected lengths")
    before = acting.factors()
    held = acting.slurm.call("scontrol", "-o", "show", "job", jobs["held"])
    assert "Priority=0" in held
    jobs["shorter"] = acting.slurm.submit("sleep 900", *QUIET, "-N2", "--exclusive", "-t", "2")
    acting.slurm.call("scancel", jobs.pop("short"))
    until(lambda: order() == ["shorter", "array", "long"], "a new job takes its place")
    assert {acting.factors()[jobs[name]] for name in ("array", "long")} == {
        before[jobs[name]] for name in ("array", "long")
    }
    acting.slurm.kill(CONTROLLER, signal.SIGTERM)  # killed, it would forget its newest jobs
    until(lambda: json.loads(acting.status().stdout)["problems"], "slurmctld is missed")
    acting.slurm.start_part(CONTROLLER)
    until(lambda: not acting.status().returncode, "slurmctld is back")
    until(lambda: order() == ["shorter", "array", "long"], "the order holds again")
    serving.kill()
    acting.serving = None
    assert order() == ["shorter", "array", "long"]


def test_a_dry_run_lists_what_it_would_do(acting: Acting) -> None:
    jobs = submit_waiting(acting.slurm)
    state = acting.home / "state"
    state.mkdir()
    history = {"version": 1, "kinds": [[0, "main", 1, "train", RATES]]}
    (state / "slurm-runs.json").write_text(json.dumps(history))
    table = str(acting.slurm.directory / "table")
    serving = acting.start("--act", "cores", "--act", "order", "--cores-table", table, "--dry-run")
    serving.wait_for_output("would give 'train' of uid 0 in main with 1 GPU: 4 CPUs")
    serving.wait_for_output(f"would set: scontrol update JobId={jobs['short']} SiteFactor=")
    assert cpus(acting.slurm, *TRAIN) == 1
    assert set(acting.factors().values()) == {0}


@pytest.fixture(scope="module")
def slow() -> Iterator[SlurmCluster]:
    """A Slurm without backfill for the length of a test: jobs behind one that waits keep waiting beside free nodes."""
    parameters = "SchedulerParameters=bf_interval=600,sched_interval=600,batch_sched_delay=0"
    with slurm_cluster(3, more=(parameters,)) as cluster:
        yield cluster


@pytest.mark.deep
def test_nodes_of_pending_jobs_are_chosen_and_given_back(slow: SlurmCluster, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, SLURM_CONF=str(slow.directory / "slurm.conf"))
    environment["COTENANT_STATE_DIR"] = str(tmp_path / "state")
    acting = Acting(slow, Cli(environment), tmp_path)

    def excluded(job: str) -> str:
        found = re.search(r"ExcNodeList=(\S*)", slow.call("scontrol", "-o", "show", "job", job))
        return found[1] if found else ""

    try:
        half = slow.submit("sleep 900", *QUIET, "-w", "n2", "-c8", "--gres=gpu:2", "-t", "2000")
        slow.wait_for_state(half, "RUNNING")
        whole = slow.submit("sleep 900", *QUIET, "-N3", "--exclusive", "-t", "10")
        small = slow.submit("sleep 900", *QUIET, "-c2", "--gres=gpu:2", "-t", "30")
        theirs = slow.submit("sleep 900", *QUIET, "-c2", "--gres=gpu:1", "-t", "30", "-x", "n1")
        dry = acting.start("--act", "nodes", "--dry-run")
        dry.wait_for_output(f"would set: scontrol update JobId={small} ExcNodeList=n1,n3")
        dry.terminate()
        assert excluded(small) == "(null)"
        serving = acting.start("--act", "nodes")
        until(lambda: excluded(small) == "n1,n3", "the job is kept from whole nodes")
        assert excluded(theirs) == "n1"
        serving.kill()  # the next one knows what is its own
        slow.call("scontrol", "update", f"JobId={theirs}", "ExcNodeList=n3")
        serving = acting.start("--act", "nodes")
        slow.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
        until(lambda: excluded(small) in ("n1", "n3"), "another node is chosen")
        slow.call("scontrol", "update", "NodeName=n2", "State=RESUME")
        until(lambda: excluded(small) == "n1,n3", "the first is chosen again")
        serving.terminate()
        assert excluded(small) == "(null)"
        assert excluded(theirs) == "n3"
        acting.start("--act", "nodes")
        until(lambda: excluded(small) == "n1,n3", "the job is kept from whole nodes")
        slow.call("scancel", whole)
        slow.submit("true", *QUIET)  # Slurm then looks at the others too
        slow.wait_for_state(small, "RUNNING")
        assert slow.call("squeue", "-h", "-j", small, "-o", "%N").strip() == "n2"
    finally:
        if acting.serving:
            acting.serving.terminate()


@pytest.mark.deep
def test_requeued_jobs_are_ordered_and_suspended_and_reserved_ones_left_alone(acting: Acting) -> None:
    slurm = acting.slurm
    whole = (*QUIET, "-N2", "--exclusive")
    first = slurm.submit("sleep 900", *whole, "-t", "20", "--requeue")
    slurm.wait_for_state(first, "RUNNING")
    slurm.call("scontrol", "suspend", first)
    long = slurm.submit("sleep 900", *whole, "-t", "600")
    slurm.call(
        *("scontrol", "create", "reservation", "ReservationName=later", "Users=root", "Nodes=n1"),
        *("StartTime=now+30days", "Duration=60"),
    )
    try:
        reserved = slurm.submit("sleep 900", *QUIET, "-t", "1", "--reservation=later")
        acting.start("--act", "order")
        until(lambda: acting.factors()[long], "the waiting job has a factor")
        assert slurm.wait_for_state(first, "SUSPENDED")
        slurm.call("scontrol", "resume", first)
        slurm.call("scontrol", "requeue", first)
        slurm.wait_for_state(first, "PENDING")
        blocker = slurm.submit("sleep 900", *whole, "-t", "5", "--nice=-1000")
        slurm.call("scontrol", "update", f"JobId={first}", "StartTime=now")
        until(lambda: slurm.call("squeue", "-h", "-t", "R").split(), "one of them runs")
        running = slurm.call("squeue", "-h", "-t", "R", "-o", "%i").split()[0]
        others = [job for job in (first, long, blocker) if job != running]
        until(lambda: all(acting.factors()[job] for job in others), "the others are ordered, requeued or not")
        by_factor = sorted(others, key=lambda job: -acting.factors()[job])
        assert by_factor == sorted(others, key=[blocker, first, long].index)
        assert acting.factors().get(reserved, 0) == 0
        shown = slurm.call("sprio", "-l", "-j", others[0])
        assert "SITE" in shown
        assert str(acting.factors()[others[0]]) in shown
    finally:
        slurm.call("scancel", "--user=root")
        until(lambda: not slurm.call("squeue", "-h").strip(), "no job is left")
        slurm.call("scontrol", "delete", "ReservationName=later")


@pytest.mark.deep
def test_the_progress_of_a_job_says_how_long_it_will_take(acting: Acting) -> None:
    out = acting.slurm.directory / "steps.out"
    script = "for n in $(seq 1 1000); do echo step $n/1000 loss 0.1; sleep 0.1; done"
    job = acting.slurm.submit(script, "-o", str(out))
    acting.slurm.wait_for_state(job, "RUNNING")
    acting.start("--progress-regex", "default")

    def explained() -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = acting.cli.json("explain", job)
        return found if found.get("estimate", {}).get("source") == "progress" else {}

    answer = until(explained, "the estimate comes from the progress")
    left = float(str(answer["estimate"]["remaining_seconds"]))
    assert 20 < left < 600  # about 100 s, longer on a machine that is loaded
