"""Reading traces: every format, and every kind of invalid file."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.simulator import BadRow, BadTrace, load
from cotenant.simulator.traces import FORMATS, TraceJob, stream, workers

ITP = "job_id,submission_time,duration,num_gpu\n"
PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
TIRESIAS = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jobs.csv"


def test_the_sample_is_read_whole() -> None:
    trace = load("sample")
    assert (trace.format, len(trace), trace.skipped, trace.notes) == ("itp", 260, (), ())
    assert trace.jobs[0] == TraceJob("5dc7d9cd-c300-9a4f-c3cd-dc2cc0935548", 0.0, 604.0, workers(16))
    assert trace.jobs[1].submitted_seconds == 2371685 - 2266647


def test_itp(file: Path) -> None:
    file.write_text(ITP + "a,100,60,1\nb,160.5,30,8\n")
    assert load(file).jobs == (TraceJob("a", 0.0, 60.0, workers(1)), TraceJob("b", 60.5, 30.0, workers(8)))


def test_tiresias(file: Path) -> None:
    file.write_text(TIRESIAS + "0,2,5,14580,resnet50,14580,5\n")
    assert load(file).jobs == (TraceJob("0", 0.0, 14580.0, workers(2), model="resnet50"),)


@pytest.fixture
def autumn_in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Live where the clock is set back at 2 o'clock on 2017-11-05."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("autumn_in_new_york")
def test_philly_times_are_utc_and_jobs_are_called_by_their_line(file: Path) -> None:
    file.write_text(
        PHILLY
        + "2017-11-05 01:30:00,60.0,4,240.0,x\n\n2017-11-05 02:30:00,30.0,1,30.0,x\n2017-11-05T04:30:00+01:00,1,1,1,x\n"
    )
    assert load(file).jobs == (
        TraceJob("line-2", 0.0, 60.0, workers(4)),
        TraceJob("line-4", 3600.0, 30.0, workers(1)),
        TraceJob("line-5", 7200.0, 1.0, workers(1)),
    )


def test_a_job_is_a_gang_of_one_gpu_replicas_without_cores() -> None:
    (role,) = load("sample").jobs[0].spec().roles
    assert (role.replicas, role.request.gpu_milli, role.request.cores) == (16, 1000, 0)


@pytest.mark.parametrize(
    "written",
    [
        ITP + "a,0,60,1\nb,1,30,2\n",
        "\ufeff" + ITP + "a,0,60,1\nb,1,30,2\n",
        (ITP + "a,0,60,1\nb,1,30,2\n").replace("\n", "\r\n"),
        'job_id,"submission_time",duration,num_gpu\n"a","0",60,1\nb,1,30,"2"\n',
        "NUM_GPU , Job_ID,duration,submission_time,user\n1,a,60,0,x\n 2 , b , 30.0 , 1 ,y\n",
        ITP + "\na,0,60,1\n\n\nb,1,30,2",
    ],
    ids=["plain", "byte order mark", "CRLF", "quotes", "other columns, order and case", "blank lines"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_the_same_jobs_are_read_however_the_file_is_written(file: Path, written: str, packed: bool) -> None:
    data = written.encode()
    file.write_bytes(gzip.compress(data) if packed else data)
    assert load(file).jobs == (TraceJob("a", 0.0, 60.0, workers(1)), TraceJob("b", 1.0, 30.0, workers(2)))


def test_unordered_jobs_are_sorted_and_it_is_said(file: Path) -> None:
    file.write_text(ITP + "c,70,1,1\na,50,1,1\nd,70,1,1\nb,60,1,1\n")
    trace = load(file)
    assert [(job.id, job.submitted_seconds) for job in trace.jobs] == [("a", 0), ("b", 10), ("c", 20), ("d", 20)]
    assert trace.notes == ("2 rows were submitted before the row above them; the jobs were sorted",)


@pytest.mark.parametrize(
    ("header", "row", "told"),
    [
        (ITP, "a,0,-5,1", "line 3, column 'duration': expected a number of seconds above 0, found '-5'"),
        (ITP, "a,0,0,1", "line 3, column 'duration': expected a number of seconds above 0, found '0'"),
        (ITP, "a,0,nan,1", "line 3, column 'duration': expected a number of seconds above 0, found 'nan'"),
        (ITP, "a,0,inf,1", "line 3, column 'duration': expected a number of seconds above 0, found 'inf'"),
        (ITP, "a,0,1e300,1", "line 3, column 'duration': expected a number of seconds above 0, found '1e300'"),
        (ITP, "a,0,,1", "line 3, column 'duration': expected a number of seconds above 0, found nothing"),
        (ITP, "a,soon,5,1", "line 3, column 'submission_time': expected a number of seconds, found 'soon'"),
        (ITP, "a,0,5,0", "column 'num_gpu': expected an integer number of GPUs from 1 to 1000000, found '0'"),
        (ITP, "a,0,5,1.5", "column 'num_gpu': expected an integer number of GPUs from 1 to 1000000, found '1.5'"),
        (ITP, "a,0,5,1e30", "column 'num_gpu': expected an integer number of GPUs from 1 to 1000000, found '1e30'"),
        (ITP, ",0,5,1", "column 'job_id': expected some text, found nothing"),
        (
            ITP,
            "first,0,5,1",
            "column 'job_id': expected a unique id for each job, found 'first', which is also the id of line 2",
        ),
        (ITP, "a,0,5", "line 3: expected 4 fields (job_id, submission_time, duration, num_gpu), found 3"),
        (ITP, "a,0,5,1,6", "line 3: expected 4 fields (job_id, submission_time, duration, num_gpu), found 5"),
        (ITP, 'a,0,5,"1', "line 3: expected a CSV row, found unexpected end of data"),
        (ITP, 'a,0,5,"1"1', "line 3: expected a CSV row, found ',' expected after '\"'"),
        (PHILLY, "17/11/05,5,1,5,x", "column 'timestamp': expected a date and time such as 2017-09-26 22:24:39"),
        (PHILLY, f"{'9' * 99},5,1,5,x", f"found '{'9' * 60}…'"),
    ],
)
def test_a_bad_row_is_named_by_line_and_column_or_left_out_and_listed(
    file: Path, header: str, row: str, told: str
) -> None:
    good = "first,0,5,1\n" if header == ITP else "2017-11-05 01:30:00,5,1,5,x\n"
    file.write_text(header + good + row)
    with pytest.raises(BadRow) as failure:
        load(file)
    assert str(failure.value).startswith(f"{file}, line 3")
    assert told in str(failure.value)
    trace = load(file, skip_bad_rows=True)
    assert len(trace) == 1
    assert [str(bad) for bad in trace.skipped] == [str(failure.value)]


def test_good_rows_after_bad_ones_are_read(file: Path) -> None:
    file.write_text(ITP + "a,0,x,1\nb,0,5,1\nc,0,5\nd,0,5,1\n")
    trace = load(file, skip_bad_rows=True)
    assert [job.id for job in trace.jobs] == ["b", "d"]
    assert [bad.line for bad in trace.skipped] == [2, 4]


def test_a_row_over_several_lines_is_named_by_its_first(file: Path) -> None:
    file.write_text(TIRESIAS + 'a,1,0,1,"res\nnet",5,0\nb,1,0,1,"res\nnet",x,0\n')
    with pytest.raises(BadRow, match="line 4, column 'duration'"):
        load(file)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty; expected a header and one row per job"),
        (b"\n\n", "is empty; expected a header and one row per job"),
        (ITP.encode(), "has no jobs after its header"),
        (ITP.encode() + b"a,0,\xff,1", "is not UTF-8 text: invalid byte 0xff"),
        (b"\xff\xfea\x00", "is not UTF-8 text"),
        (gzip.compress(ITP.encode(), mtime=0)[:-9], "is a damaged gzip file"),
        (b"a,b\n1,2\n", "unknown format, header (a, b); the nearest is cotenant, which also requires"),
        (b"job_id,duration,num_gpu\n1,2,3\n", "the nearest is itp, which also requires submission_time"),
        (b"timestamp,duration,num_gpu\n1,2,3\n", "the nearest is philly, which also requires num_gpus"),
        (b"duration,duration\n", "line 1, column 'duration': expected each column once, found it more than once"),
        (b'"duration\n', "line 1: expected a CSV header, found unexpected end of data"),
    ],
)
def test_a_file_that_is_not_a_trace_is_rejected_with_a_reason(file: Path, content: bytes, told: str) -> None:
    file.write_bytes(content)
    with pytest.raises(BadTrace) as failure:
        load(file)
    assert str(file) in str(failure.value)
    assert told in str(failure.value)


def test_where_every_row_is_bad_there_is_no_trace(file: Path) -> None:
    file.write_text(ITP + "a,0,0,1\nb,0,0,1\n")
    with pytest.raises(BadTrace, match=r"has no jobs; all 2 rows are invalid, the first: .*line 2, column 'duration'"):
        load(file, skip_bad_rows=True)


def test_a_missing_or_irregular_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be read: No such file or directory"):
        load(tmp_path / "none.csv")
    with pytest.raises(BadTrace, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_the_error_for_a_wrong_format_names_the_likely_one(file: Path) -> None:
    file.write_text(PHILLY + "2017-11-05 01:30:00,5,1,5,x\n")
    with pytest.raises(
        BadTrace, match=r"format itp needs job_id, submission_time, num_gpu, .*looks like .* format philly"
    ):
        load(file, "itp")
    file.write_text("a,b\n")
    with pytest.raises(BadTrace, match=r"format itp needs job_id, submission_time, duration, num_gpu, found a, b$"):
        load(file, "itp")


def test_the_error_for_an_unknown_format_names_the_nearest(file: Path) -> None:
    with pytest.raises(
        BadTrace, match=r"unknown trace format 'phily'; did you mean philly. known are cotenant, gavel, itp,"
    ):
        load(file, "phily")
    with pytest.raises(BadTrace, match="unknown trace format 'xyz'; known are cotenant, gavel, itp,"):
        load(file, "xyz")


def test_a_trace_is_read_as_it_comes(file: Path) -> None:
    file.write_text(ITP + "a,0,5,1\n" + "b,0,x,1\n" * 100_000)
    pieces = stream(file)
    assert next(pieces) is FORMATS["itp"]
    assert next(pieces) == TraceJob("a", 0.0, 5.0, workers(1))
    assert isinstance(next(pieces), BadRow)
