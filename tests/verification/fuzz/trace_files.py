"""Input of the simulator: traces in every format, snapshots, recordings."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

from tests.verification.fuzz.targets import Prepared, Target, file_target

from cotenant.cli.research.replay import _about, _show
from cotenant.core.policy.options import BadOption
from cotenant.reproduction.model import BadData
from cotenant.reproduction.model import table as published
from cotenant.simulator import snapshots
from cotenant.simulator.overlays import parse_overlays
from cotenant.simulator.recording.event_file import Recording, writing
from cotenant.simulator.recording.event_validation import BadRecording
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.traces import load
from cotenant.simulator.traces.cotenant_format import OPTIONAL, REQUIRED
from cotenant.simulator.traces.trace_job import BadTrace

TRACES = {
    "philly": (b"timestamp,num_gpus,duration\n2017-09-26 22:24:39,4,99\n2017-10-03T06:14:54+02:00,1,7.5\n",),
    "itp": (b"job_id,num_gpu,submission_time,duration\n1,8,10,600\n2,1,20.5,3\n",),
    "tiresias": (
        b"job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n1,4,0,9,vgg,50,1\n2,1,3,9,a,5,1\n",
    ),
    "muri": (
        b"job_id,num_gpu,submit_time,iterations,model_name,duration,interval,iteration_time,resource_time_0,priority\n"
        b"1,4,1000,9,vgg,5000,1,2,0.5,1\n2,1,3000,9,a,700,1,2,0.25,0\n",
    ),
    "openb": (
        b"name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        b"a,12000,16384,1,1000,,LS,Running,0,12537496,0\nb,500,64,0,0,,BE,Failed,5,12.5,\n"
        b"c,6000,3333,1,460,P100|T4,Burstable,Succeeded,20,30,25\n",
    ),
    "synergy": (
        b"1,resnet18,0,100,1\n2,resnet50,60.5,900,8\n",
        b"job_id,model,arrival_s,iters,gpus\n1,resnet18,0,5,1\n",
    ),
    "gavel": (
        b"ResNet-18 (batch size 32)\tpython3 main.py\tcv\t--num_steps\t1\t5000\t1\t1.0\t-1.0\t0\n"
        b"ResNet-18 (batch size 32)\tpython3 main.py\tcv\t--num_steps\t1\t700\t1\t2.0\t1.5\t33.5\n",
    ),
    "cotenant": (
        b"job_id,submitted_seconds,work_seconds,gpus\na,0,100,8\nb,5,1.5,1\n",
        ",".join(REQUIRED).encode()
        + b",gpu_milli,replicas,replicas_max,cores,memory_bytes,gpu_type_wanted,kind,tenant,user,priority,preemptible,"
        b"deadline_seconds,locality,memory_bandwidth_bytes_per_second,ended,latency_seconds,latency_percentile,"
        b"arrivals_per_second,batch_request_seconds,batch_fixed_seconds\n"
        b"a,0,60,500,1,4,auto,1024,T4,inference,t,u,high,yes,900,rack,1e9,passed,0.1,99,5,0.01,0.02\n"
        b"b,3,60,2000,2,,4,,,training,,,-3,no,,node,,killed,,,,,\n",
    ),
}
SNAPSHOT = snapshots.Snapshot(
    1000.0,
    (snapshots.Node("n0", 4, 16, "V100", shareable=True, memory_bytes=2**30), snapshots.Node("n1", 0, 8, rack="a")),
    (
        snapshots.Job("a", 10.0, (snapshots.Part(gpu_milli=500, cores=2),), running_since_seconds=20.0,
                      held=(snapshots.Held("n0", 0, 2, ((0, 500),)),), cores=(2,)),
        snapshots.Job("b", 30.0, (snapshots.Part(gpu_milli=2000),), known=snapshots.Known(50.0, 0.5)),
    ),
    policies={"queue": snapshots.InUse("fifo", {"mode": "strict"})},
).dump().encode()  # fmt: skip
JOBS = b"job_id,submission_time,duration,num_gpu\na,0,9000,2\nb,5,20000,4\nc,9,300,1\nd,4000,50,2\ne,4100,90,1\n"
SHORT_LIVED = {"failed_percent": "40", "preemption_cost_seconds": "5"}
OVERLAYS = (
    b"cores=auto",
    b"tenants=4",
    b"models=4",
    b"priorities=0.5",
    b"deadlines=1.5",
    b"cpu-jobs=0.5\ntenants=zipf:9",
)


def targets() -> Iterator[Target]:
    """Yield the targets."""
    columns = [name.encode() for name in (*REQUIRED, *OPTIONAL)]
    bad = (BadTrace,)
    for name, seeds in TRACES.items():
        yield Target(f"trace {name}", file_target(f"{name}.csv", partial(_strict, name), seeds), bad)
    every = [seed for seeds in TRACES.values() for seed in seeds]
    yield Target("trace of any format", file_target("any.csv", _lenient, every, columns), bad)
    yield Target("trace in Parquet", _parquet, bad)
    yield Target("snapshot", file_target("snapshot.json", _lenient, (SNAPSHOT,)), bad)
    yield Target("recording", _recordings, (BadRecording,))
    yield Target("recording in Parquet", _recording_in_parquet, (BadRecording,))
    table = b"job,gpus,seconds\n1,8,60\n2,1,9.5\n"
    yield Target(
        "published table",
        file_target("table.csv", lambda path: list(published(path, "job", "gpus")), (table,)),
        (BadData,),
    )
    yield Target("overlays", _overlays, (BadOption,))


def _strict(name: str, path: Path) -> None:
    for job in load(path, name).jobs:
        job.spec()


def _lenient(path: Path) -> None:
    load(path, skip_bad_rows=True)


@cache
def _recorded() -> bytes:
    """Return the recording of a simulation in which jobs wait, are preempted, fail and are resized."""
    with tempfile.TemporaryDirectory(prefix="cotenant-fuzz-") as directory:
        trace, path = Path(directory, "jobs.csv"), Path(directory, "events.jsonl")
        trace.write_bytes(JOBS)
        scenario = Scenario(str(trace), "2x2", queue="las", options={"placement": {}, "simulator": SHORT_LIVED})
        with writing(path, scenario) as recorder:
            recorder.end(complete=scenario.run(recorder=recorder).complete)
        return path.read_bytes().replace(directory.encode(), b"/lab")


def _recording(path: Path) -> None:
    """Read it, and report on it as `cotenant replay` does."""
    recording = Recording(path)
    events = list(recording.events())
    with redirect_stdout(out := StringIO()), redirect_stderr(out):
        for as_json in (False, True):
            _show(recording, _about(events, None, None, ()), as_json=as_json)
        _show(recording, _about(events, "b", 1, ("started", "preempted", "waiting")), as_json=False)
    out.getvalue().encode()
    recording.scenario()


def _recordings(directory: Path) -> Prepared:
    whole = _recorded()
    lines = whole.splitlines(keepends=True)
    files = whole.replace(b'"files":{', b'"files":{"cluster":"cd",', 1)
    few = b"".join([lines[0], *lines[1:-1:5], lines[-1]])
    return Prepared(file_target("events.jsonl", _recording, ())(directory).run, (whole, few, files))


def _recording_in_parquet(directory: Path) -> Prepared:
    """Return changed bytes of a valid file, and valid files with changed rows, columns and metadata."""
    import pyarrow
    from pyarrow import parquet

    from cotenant.simulator.recording.event_parquet import END, HEADER, SCHEMA

    head, *events, end = _recorded().splitlines()

    def packed(header: bytes, table: Any, tail: bytes) -> bytes:
        out = io.BytesIO()
        parquet.write_table(table.replace_schema_metadata({HEADER: header, END: tail}), out)
        return out.getvalue()

    def changed(text: bytes) -> bytes:
        """Write changed lines as rows, if pyarrow can: unchanged, or converted to the columns' types."""
        first, *rows, last = text.splitlines() if text.count(b"\n") > 1 else (head, *events, end)
        decoded = [row for line in rows if isinstance(row := json.loads(line), dict)]
        schema = None if sum(text[:64]) % 2 else SCHEMA
        return packed(first, pyarrow.Table.from_pylist(decoded, schema), last)

    good = packed(head, pyarrow.Table.from_pylist([json.loads(line) for line in events], SCHEMA), end)
    run = file_target("events.parquet", _recording, ())(directory).run

    def pack(data: bytes) -> bytes:
        if data.startswith(b"PAR1"):
            return data
        with suppress(Exception):  # errors of pyarrow's writer are not ours
            return changed(data)
        at = sum(data) % len(good)
        return good[:at] + data[:3] + good[at + len(data) % 5 :]

    few = b"\n".join([head, *events[:6], end])
    return Prepared(run, (good, b"\n".join([head, *events, end]), few), pack=pack)


def _overlays(directory: Path) -> Prepared:
    def run(data: bytes) -> None:
        parse_overlays(data.decode(errors="replace").split("\n"))

    return Prepared(run, OVERLAYS)


def _parquet(directory: Path) -> Prepared:
    from pyarrow import csv, parquet

    def packed(text: bytes) -> bytes:
        out = io.BytesIO()
        parquet.write_table(csv.read_csv(io.BytesIO(text)), out)
        return out.getvalue()

    run = file_target("trace.parquet", _lenient, ())(directory).run
    texts = [seed for name in ("cotenant", "itp", "philly", "openb") for seed in TRACES[name]]

    def pack(text: bytes) -> bytes:
        """Write what was changed as Parquet, if possible; otherwise, or every fourth time, damage the file."""
        try:
            good = packed(text)
        except Exception:  # errors of pyarrow's writer are not ours
            good = packed(texts[0])
        else:
            if sum(text[:64]) % 4:
                return good
        at = sum(text) % len(good)
        return good[:at] + text[:3] + good[at + len(text) % 5 :]

    return Prepared(run, texts, pack=pack)
