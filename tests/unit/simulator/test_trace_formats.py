"""The meaning of each published format, on rows made by hand; and the published files themselves, if present."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from tests.support.paths import SHARED_DATA as DATA

from cotenant.core.model.job import JobKind, Request, Role
from cotenant.simulator import BadRow, BadTrace, Trace, TraceJob, load, simulate
from cotenant.simulator.traces import workers
from cotenant.simulator.traces.trace_job import Ended, replicas

PUBLISHED = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the public data in {DATA}")

OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,resource_time_1,resource_time_2,priority\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def test_an_openb_pod_is_one_process_with_whole_cores_and_the_time_since_it_was_scheduled(file: Path) -> None:
    file.write_text(
        OPENB
        + "a,12500,1024,1,460,,LS,Running,100,1100,150\n"
        + "b,8000,2048,0,0,,BE,Succeeded,110,400,\n"
        + "c,88000,1,8,1000,V100M16|V100M32,Burstable,Failed,120,130,121\n"
        + "d,1,1,2,1000,T4|P100,Guaranteed,Pending,130,140,\n"
    )
    assert load(file).jobs == (
        TraceJob(
            "a",
            0,
            950,
            replicas(1, Request(460, 13, memory_bytes=2**30)),
            JobKind.INFERENCE,
            priority=2,
            preemptible=False,
        ),
        TraceJob("b", 10, 290, replicas(1, Request(0, 8, memory_bytes=2**31)), JobKind.CPU, ended=Ended.PASSED),
        TraceJob(
            "c",
            20,
            9,
            replicas(1, Request(8000, 88, memory_bytes=2**20, gpu_type="V100M16|V100M32")),
            priority=1,
            ended=Ended.FAILED,
        ),
        TraceJob(
            "d",
            30,
            10,
            replicas(1, Request(2000, 1, memory_bytes=2**20, gpu_type="T4|P100")),
            priority=2,
            preemptible=False,
        ),
    )


def test_a_synergy_job_runs_its_iterations_at_the_fair_share_of_a_server(file: Path) -> None:
    file.write_text("\n0,alexnet,5.0,3349,1\n1,lstm,5.001,669922,4\n")
    trace = load(file)
    assert trace.format == "synergy"
    first, second = trace.jobs
    assert first == TraceJob("0", 0, 3349 * 0.6, workers(1), model="alexnet", gpu_type="V100")
    assert (second.work_seconds, second.roles) == (669922 * 0.011, workers(4))


GAVEL = "LM (batch size 40)\tpython3 main.py, --x\tlm\t--steps\t1\t{steps}\t{gpus}\t{weight}\t{slo}\t{at}\n"


def test_a_gavel_job_runs_its_steps_at_the_speed_of_so_many_v100(file: Path) -> None:
    file.write_text(
        GAVEL.format(steps=45237, gpus=1, weight=1, slo="-1.000000", at=10)
        + GAVEL.format(steps=9603, gpus=4, weight=5.0, slo=2, at=20)
    )
    trace = load(file)
    assert trace.format == "gavel"
    first, second = trace.jobs
    assert (first.id, first.model, first.roles) == ("line-1", "LM (batch size 40)", workers(1))
    assert first.work_seconds == pytest.approx(45237 / 45.23737155222392)
    assert (first.deadline_seconds, first.priority) == (None, 0)
    assert second.work_seconds == pytest.approx(9603 / 96.0312451685392)
    assert second.deadline_seconds == pytest.approx(10 + 2 * second.work_seconds)
    assert (second.submitted_seconds, second.priority, second.roles) == (10, 4, workers(4))


def test_muri_writes_milliseconds(file: Path) -> None:
    file.write_text(MURI + "7,4,1456000,1005573,resnet18,128,926133000,1456000,921,723,113,73,1\n" * 1)
    (job,) = load(file).jobs
    assert job == TraceJob("7", 0, 926133.0, workers(4), model="resnet18", gpu_type="V100")


def test_the_time_of_a_muri_job_may_be_more_milliseconds_than_there_may_be_seconds(file: Path) -> None:
    file.write_text(MURI + "".join(f"{n},1,{n}0817570000,1,vgg19,16,1000,1,1,1,1,1,0\n" for n in (1, 2)))
    assert load(file).jobs[1].submitted_seconds == 1e7


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (OPENB + "a,1,1,1,1000,,LS,Running,5,5,5", "'deletion_time': expected a time after scheduled_time, which is 5"),
        (OPENB + "a,1,1,1,1000,,LS,Running,5,5,", "'deletion_time': expected a time after creation_time, which is 5"),
        (OPENB + "a,1,1,1,1001,,LS,Running,5,6,5", "'gpu_milli': expected an integer from 0 to 1000"),
        (OPENB + "a,1,1,1,0,,LS,Running,5,6,5", "'gpu_milli': expected 1 to 1000 for 1 GPUs"),
        (OPENB + "a,1,1,2,500,,LS,Running,5,6,5", "'gpu_milli': expected 1000 for 2 GPUs"),
        (OPENB + "a,0,1,0,0,,LS,Running,5,6,5", "'cpu_milli': expected cores for a pod without GPUs"),
        (OPENB + "a,1,1,1,1000,,XX,Running,5,6,5", "'qos': expected one of LS, Guaranteed, Burstable, BE, found 'XX'"),
        ("0,alexnet,0,0,1", "line 1, column 'iters': expected a number of iterations above 0"),
        ("0,alexnot,0,5,1", "line 1, column 'model': expected one of alexnet, bert"),
        (GAVEL.format(steps=1, gpus=3, weight=1, slo=-1, at=0), "was measured on V100: 1, 2, 4, 8, found '3'"),
        (GAVEL.format(steps=1, gpus=1, weight=-2, slo=-1, at=0), "expected a number of weight from 0 to 1e+06"),
        ("x\t\t\t\t1\t1\t1\t1\t-1\t0", "'job_type': expected a job type measured on V100, found 'x'"),
        (MURI + "7,4,0,1,resnet18,128,0,0,921,723,113,73,1", "'duration': expected a number of milliseconds above 0"),
    ],
)
def test_an_invalid_row_is_reported_in_the_formats_terms(file: Path, row: str, told: str) -> None:
    file.write_text(row)
    with pytest.raises(BadRow) as failure:
        load(file)
    assert told in str(failure.value)


def test_a_file_without_a_header_is_read_in_the_given_format(file: Path) -> None:
    file.write_text("job_id,submission_time,duration,num_gpu\na,0,1,1\n")
    with pytest.raises(BadRow, match="line 1: expected 5 fields"):
        load(file, "synergy")
    file.write_text("0,alexnet,0,5,1\n")
    with pytest.raises(BadTrace, match=r"format itp needs a header with job_id.* found a row of format synergy"):
        load(file, "itp")


COUNTS = {  # rows, including invalid ones
    "openb/openb_pod_list_default.csv": ("openb", 8152, 1),
    "openb/openb_pod_list_cpu050.csv": ("openb", 7439, 1),
    "openb/openb_pod_list_gpushare40.csv": ("openb", 8152, 2),
    "synergy/static_100job_6_3_1100.0": ("synergy", 100, 0),
    "gavel/max_min_fairness.trace": ("gavel", 96, 0),
    "gavel/small_test.trace": ("gavel", 20, 0),
    "muri/trace1.csv": ("muri", 1494, 0),
    "muri/job_type_1.csv": ("muri", 992, 0),
    "itp/cluster08.csv": ("itp", 13047, 0),
    "philly/11cb48.csv": ("philly", 16091, 0),
    "bench/itp_05.csv": ("tiresias", 3629, 0),
}


@PUBLISHED
@pytest.mark.parametrize("name", COUNTS)
def test_a_published_file_is_detected_and_read_completely(name: str) -> None:
    trace = load(DATA / name, skip_bad_rows=True)
    assert (trace.format, len(trace) + len(trace.skipped), len(trace.skipped)) == COUNTS[name]


def raw(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def by_id(trace: Trace) -> dict[str, TraceJob]:
    return {job.id: job for job in trace.jobs}


@PUBLISHED
def test_openb_s_pods_are_those_of_the_file() -> None:
    name = "openb/openb_pod_list_default.csv"
    jobs, rows = by_id(load(DATA / name, skip_bad_rows=True)), raw(name)
    for row in rows[::97]:
        job = jobs[row["name"]]
        (role,) = job.roles
        assert role.request.gpu_milli == int(row["num_gpu"]) * int(row["gpu_milli"])
        assert 0 <= role.request.cores * 1000 - int(row["cpu_milli"]) < 1000  # type: ignore[operator]  # never auto
        assert job.work_seconds == float(row["deletion_time"]) - float(row["scheduled_time"] or row["creation_time"])
        assert job.submitted_seconds == float(row["creation_time"])  # the first was submitted at 0
    kinds = Counter(job.kind for job in jobs.values())
    assert kinds[JobKind.CPU] == 1088


@PUBLISHED
def test_gavel_s_speeds_are_those_that_were_published() -> None:
    speeds = json.loads((DATA / "gavel" / "simulation_throughputs.json").read_text())["v100"]
    with (DATA / "gavel" / "max_min_fairness.trace").open() as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    jobs = by_id(load(DATA / "gavel" / "max_min_fairness.trace"))
    for number, row in enumerate(rows, 1):
        alone = speeds[f"('{row[0]}', {row[6]})"]["null"]
        assert jobs[f"line-{number}"].work_seconds == pytest.approx(int(row[5]) / alone, rel=1e-8)


@PUBLISHED
def test_muri_s_durations_are_iterations_times_their_time() -> None:
    jobs = by_id(load(DATA / "muri" / "trace1.csv"))
    for row in raw("muri/trace1.csv")[::31]:
        milliseconds = int(row["iterations"]) * float(row["iteration_time"])
        assert jobs[row["job_id"]].work_seconds == pytest.approx(milliseconds / 1000, abs=2)


@PUBLISHED
def test_openb_s_pods_run_on_openb_s_nodes() -> None:
    nodes = DATA / "openb" / "openb_node_list_all_node.csv"
    trace = load(DATA / "openb" / "openb_pod_list_default.csv", skip_bad_rows=True)
    few = Trace(trace.source, trace.format, trace.jobs[:200])
    assert simulate(few, str(nodes), placement="first-fit").finished == 200


def test_jobs_of_one_shape_share_their_roles(file: Path) -> None:
    file.write_text(OPENB + "".join(f"{name},8000,1,1,1000,,BE,Failed,0,9,0\n" for name in "ab"))
    first, second = load(file).jobs
    assert first.roles is second.roles
    assert first.roles == (Role("worker", 1, Request(1000, 8, memory_bytes=2**20)),)
