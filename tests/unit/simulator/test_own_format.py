"""Our own format, in CSV and Parquet: the meaning of each column, round trips, and rejected input."""

from __future__ import annotations

import gzip
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.model.job import (
    NO_SPREAD,
    JobKind,
    Locality,
    OpenReplicas,
    Qos,
    Request,
    Role,
    Spread,
    SpreadBy,
)
from cotenant.core.prediction.batch_queueing import BatchTime
from cotenant.simulator import BadRow, BadTrace, TraceJob, load
from cotenant.simulator.traces import FORMATS, write
from cotenant.simulator.traces.trace_job import Ended, open_replicas, replicas

NEEDED = "job_id,submitted_seconds,work_seconds"
EACH_EXAMPLE_OWN_CONTENT = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jobs.csv"


def test_three_columns_are_enough(file: Path) -> None:
    file.write_text(f"{NEEDED}\na,100,60\nb,160.5,30.25\n")
    trace = load(file)
    assert trace.format == "cotenant"
    assert trace.jobs == (
        TraceJob("a", 0, 60, replicas(1, Request(gpu_milli=1000, cores=0))),
        TraceJob("b", 60.5, 30.25, replicas(1, Request(gpu_milli=1000, cores=0))),
    )


def test_each_column_sets_its_field(file: Path) -> None:
    file.write_text(
        f"{NEEDED},gpus,replicas,cores,memory_bytes,gpu_type_wanted,kind,tenant,user,model,name,gpu_type,priority,"
        "preemptible,deadline_seconds,locality,spread_by,spread_min,memory_bandwidth_bytes_per_second,ended\n"
        "a,100,60,2,3,4,1024,A100,inference,t,u,m,n,V100,-5,no,700,rack,node,2,2.5e9,killed\n"
    )
    assert load(file).jobs == (
        TraceJob(
            "a",
            0,
            60,
            (Role("worker", 3, Request(2000, 4, memory_bytes=1024, gpu_type="A100")),),
            kind=JobKind.INFERENCE,
            tenant="t",
            user="u",
            model="m",
            name="n",
            gpu_type="V100",
            priority=-5,
            preemptible=False,
            deadline_seconds=600,  # on the same clock as the submission, which moved to 0
            locality=Locality.RACK,
            spread=Spread(SpreadBy.NODE, 2),
            memory_bandwidth_bytes_per_second=2.5e9,
            ended=Ended.KILLED,
        ),
    )


@pytest.mark.parametrize(
    ("columns", "fields", "kind", "request_"),
    [
        ("gpus,cores", "0,8", JobKind.CPU, Request(cores=8)),
        ("kind,cores", "cpu,auto", JobKind.CPU, Request(cores=None)),
        ("gpu_milli", "300", JobKind.TRAINING, Request(300, 0)),
        ("gpu_milli,gpus", ",2", JobKind.TRAINING, Request(2000, 0)),
        ("kind", "inference", JobKind.INFERENCE, Request(1000, 0)),
        ("cores", "none", JobKind.TRAINING, Request(1000, 0)),
        ("cores", "AUTO", JobKind.TRAINING, Request(1000, None)),
    ],
)
def test_kind_and_request_follow_from_each_other(
    file: Path, columns: str, fields: str, kind: JobKind, request_: Request
) -> None:
    file.write_text(f"{NEEDED},{columns}\na,0,1,{fields}\n")
    (job,) = load(file).jobs
    assert (job.kind, job.roles) == (kind, replicas(1, request_))


@pytest.mark.parametrize(
    ("columns", "fields", "told"),
    [
        ("gpus", "x", "column 'gpus': expected an integer from 0 to 1000000, found 'x'"),
        ("gpus", "1.5", "column 'gpus': expected an integer"),
        ("gpu_milli", "1500", "column 'gpu_milli': expected thousandths of one GPU, or a number of whole GPUs"),
        ("gpus,gpu_milli", "1,1000", "column 'gpu_milli': expected nothing together with gpus"),
        ("gpus", "0", "column 'cores': expected a number of cores, or auto, for a job without GPUs, found nothing"),
        ("kind,gpus", "cpu,1", "column 'gpus': expected no GPUs for a job of kind cpu"),
        ("kind", "batch", "column 'kind': expected one of training, inference, cpu, found 'batch'"),
        ("replicas", "0", "column 'replicas': expected an integer from 1 to"),
        ("cores", "-1", "column 'cores': expected an integer from 0 to 1000000, auto or none, found '-1'"),
        ("cores", "many", "column 'cores': expected an integer from 0 to 1000000, auto or none, found 'many'"),
        ("memory_bytes", "8G", "column 'memory_bytes': expected an integer"),
        ("gpus,cores,gpu_type_wanted", "0,1,A100", "column 'gpu_type_wanted': expected nothing for a job without GPUs"),
        ("priority", "higher", "column 'priority': expected an integer from -1000000 to 1000000, found 'higher'"),
        ("preemptible", "perhaps", "column 'preemptible': expected true or false, found 'perhaps'"),
        ("deadline_seconds", "soon", "column 'deadline_seconds': expected a number of seconds, found 'soon'"),
        ("locality", "room", "column 'locality': expected one of server, rack, anywhere, found 'room'"),
        ("spread_by", "node", "column 'spread_min': expected a number together with spread_by"),
        ("spread_min,replicas", "3,2", "column 'spread_min': expected an integer from 0 to 2, found '3'"),
        ("memory_bandwidth_bytes_per_second", "-1", "expected a number of bytes/s from 0 to 1e+15, found '-1'"),
        ("ended", "well", "column 'ended': expected one of passed, killed, failed, found 'well'"),
        ("replicas_max", "3", "column 'replicas_max': expected nothing, except for a job of kind inference, found '3'"),
        ("kind,replicas,replicas_max", "inference,4,3", "column 'replicas_max': expected an integer from 4 to"),
        ("kind,replicas_max", "inference,3", "column 'latency_seconds': expected a value, which a service"),
        ("latency_percentile", "100", "column 'latency_percentile': expected a number of per cent"),
        ("batch_fixed_seconds", "long", "column 'batch_fixed_seconds': expected a number of seconds from 0"),
    ],
)
def test_a_field_that_cannot_be_is_named(file: Path, columns: str, fields: str, told: str) -> None:
    file.write_text(f"{NEEDED},{columns}\na,0,1,{fields}\n")
    with pytest.raises(BadRow) as failure:
        load(file)
    assert told in str(failure.value)
    assert ", line 2, " in str(failure.value)


def test_a_misspelled_column_is_reported_and_others_are_ignored(file: Path) -> None:
    file.write_text(f"{NEEDED},replica\na,0,1,8\n")
    with pytest.raises(BadTrace, match="unknown column 'replica' in format cotenant; did you mean replicas"):
        load(file)
    file.write_text(f",{NEEDED},comment\n0,a,0,1,fine\n")
    assert len(load(file)) == 1


numbers = st.floats(0, 1e9, allow_subnormal=False)
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp")), max_size=12)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[TraceJob, ...]:
    ids = draw(st.lists(words.filter(bool), min_size=1, max_size=6, unique=True))
    return tuple(_job(draw, job_id, first=number == 0) for number, job_id in enumerate(ids))


def _job(draw: st.DrawFn, job_id: str, *, first: bool) -> TraceJob:
    kind = draw(st.sampled_from(JobKind))
    milli = 0 if kind is JobKind.CPU else draw(st.sampled_from((0, 1, 999, 1000, 8000)))
    cores = draw(st.none() | st.integers(0 if milli else 1, 256))
    wanted = draw(st.sampled_from(("", "A100"))) if milli else ""
    request, least = (
        Request(milli, cores, memory_bytes=draw(st.integers(0, 2**45)), gpu_type=wanted),
        draw(st.integers(1, 64)),
    )
    serves = kind is JobKind.INFERENCE and draw(st.booleans())
    some = draw(st.tuples(*[st.floats(1e-6, 90.0)] * 3))
    return TraceJob(
        job_id,
        0.0 if first else draw(numbers),
        draw(numbers.filter(lambda seconds: seconds > 0)),
        open_replicas(OpenReplicas(least, least + 9), request) if serves else replicas(least, request),
        kind,
        tenant=draw(words) or "default",
        model=draw(words),
        name=draw(words),
        user=draw(words),
        gpu_type=draw(words),
        priority=draw(st.integers(-9, 9)),
        preemptible=draw(st.booleans()),
        deadline_seconds=draw(st.none() | numbers),
        locality=draw(st.none() | st.sampled_from(Locality)),
        spread=draw(st.just(NO_SPREAD) | st.builds(Spread, st.none() | st.sampled_from(SpreadBy), st.just(least))),
        memory_bandwidth_bytes_per_second=draw(numbers),
        ended=draw(st.none() | st.sampled_from(Ended)),
        qos=Qos(0.0, *some) if serves else Qos(),
        batch=draw(st.none() | st.just(BatchTime(0.0, some[0]))) if serves else None,
    )


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".parquet"])
@EACH_EXAMPLE_OWN_CONTENT
@given(written=jobs())
def test_what_is_written_is_read(tmp_path: Path, ending: str, written: tuple[TraceJob, ...]) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow, which the extra research brings")
    path = tmp_path / f"jobs{ending}"
    write(written, path)
    assert load(path).jobs == tuple(sorted(written, key=lambda job: job.submitted_seconds))


def test_the_same_jobs_are_written_as_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / "a.csv.gz", tmp_path / "b.csv.gz"]
    for path in files:
        write(load("sample").jobs, path)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes()[4:8] == bytes(4)  # no modification time
    assert gzip.decompress(files[0].read_bytes()).startswith(b"job_id,submitted_seconds,work_seconds,gpu_milli")


def test_a_job_of_two_roles_cannot_be_written_and_no_file_is_left(tmp_path: Path) -> None:
    job = TraceJob("a", 0, 1, (Role("ps"), Role("worker")))
    with pytest.raises(BadTrace, match="job a has 2 roles; this format supports only one"):
        write([job], tmp_path / "jobs.csv")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"the ending selects the format, .* one of \.csv, \.csv\.gz, \.parquet"):
        write(load("sample").jobs, tmp_path / "jobs.xlsx")
    with pytest.raises(BadTrace, match="cannot be written: No such file or directory"):
        write(load("sample").jobs, tmp_path / "nowhere" / "jobs.csv")


def parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, which the extra research brings")
    import_module("pyarrow.parquet").write_table(pyarrow.table(columns), path)


def test_parquet_of_any_format_with_a_header_is_read_and_its_rows_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "jobs.parquet"
    columns: dict[str, list[Any]]
    columns = {"job_id": ["a", "b"], "submission_time": [5, 6], "duration": [1.5, float("nan")], "num_gpu": [2, 1]}
    parquet(file, columns)
    with pytest.raises(BadRow, match="row 2, column 'duration': expected a number of seconds above 0, found nothing"):
        load(file)
    trace = load(file, skip_bad_rows=True)
    assert (trace.format, len(trace), trace.jobs[0].work_seconds) == ("itp", 1, 1.5)
    parquet(file, {**columns, "job_id": ["a", "a"], "duration": [1, 2]})
    with pytest.raises(BadRow, match=r"row 2, column 'job_id': .* found 'a', which is also the id of row 1"):
        load(file)


def test_a_damaged_parquet_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "jobs.parquet"
    parquet(file, {"a": [1]})
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(BadTrace, match=r"jobs\.parquet cannot be read as Parquet"):
        load(file)


def test_without_pyarrow_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "jobs.parquet"
    file.write_bytes(b"PAR1")

    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr("cotenant.simulator.traces.parquet.import_module", missing)
    with pytest.raises(BadTrace, match=r"needs pyarrow: pip install 'cotenant\[research\]'"):
        load(file)
    with pytest.raises(BadTrace, match=r"needs pyarrow: pip install 'cotenant\[research\]'"):
        write(load("sample").jobs, tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.parquet"]


HEADERS = [",".join(known.columns) for known in FORMATS.values()] + [f"{NEEDED},gpus,cores,kind,deadline_seconds"]
fields = st.one_of(
    st.text(max_size=5),
    st.integers(-(10**25), 10**25).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["0", "1", "-1", "", "nan", "1e999", "LS", "BE", "alexnet", "2017-09-26 22:24:39", "auto", '"', "\t"]
    ),
)


@EACH_EXAMPLE_OWN_CONTENT
@given(
    header=st.sampled_from(HEADERS),
    rows=st.lists(st.lists(fields, min_size=1, max_size=11), max_size=5),
    delimiter=st.sampled_from(",\t"),
    name=st.none() | st.sampled_from(sorted(FORMATS)),
)
def test_any_rows_are_jobs_or_rejected_with_a_reason(
    file: Path, header: str, rows: list[list[str]], delimiter: str, name: str | None
) -> None:
    text = "\n".join([header, *(delimiter.join(row) for row in rows)])
    file.write_text(text, encoding="utf-8", errors="replace")
    with suppress(BadTrace):
        load(file, name)
    with suppress(BadTrace):
        assert load(file, name, skip_bad_rows=True).jobs


@EACH_EXAMPLE_OWN_CONTENT
@given(content=st.binary(max_size=200), begins=st.sampled_from([b"", b"PAR1", b"\x1f\x8b", b"\xef\xbb\xbf"]))
def test_any_bytes_are_a_trace_or_rejected_with_a_reason(file: Path, content: bytes, begins: bytes) -> None:
    file.write_bytes(begins + content)
    with suppress(BadTrace):
        load(file)
