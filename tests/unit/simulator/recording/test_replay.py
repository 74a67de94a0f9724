"""Recording files, and their replay."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.properties import amount
from tests.unit.simulator.commands import cotenant

from cotenant.simulator.engine import Simulation
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.recording.event_file import Recording, writing
from cotenant.simulator.recording.event_validation import BadRecording
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.traces import load

JOBS = "job_id,submission_time,duration,num_gpu\n" + "".join(
    f"j{number},{number * 37 % 190},{(50 + number * 53 % 400) * 20},{1 + number * 7 % 4}\n" for number in range(24)
)


@pytest.fixture(params=["jsonl", "parquet"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra `research`")
    (tmp_path / "jobs.csv").write_text(JOBS)
    file = tmp_path / f"events.{request.param}"
    told = cotenant(
        "simulate", "--trace", tmp_path / "jobs.csv", "--cluster", "2x4", "--queue", "las", "--events", file
    )
    assert told.exit_code == 0, told.stderr
    return file


def test_a_recording_runs_again_byte_for_byte(recorded: Path) -> None:
    told = cotenant("replay", "--check", recorded)
    assert told.exit_code == 0, told.stderr
    assert told.stdout.startswith("identical: ")
    assert [path.name for path in recorded.parent.iterdir() if path.name.startswith(".")] == []


def test_a_recording_with_moves_runs_again_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(JOBS)
    file = tmp_path / "events.jsonl"
    given = ["queue.mode=backfill", "placement.settled_seconds=60", "simulator.preemption_cost_seconds=5"]
    told = cotenant(
        "simulate", "--trace", tmp_path / "jobs.csv", "--cluster", "3x4", "--placement", "locality", "--events", file,
        *(word for option in given for word in ("--option", option)),
    )  # fmt: skip
    assert told.exit_code == 0, told.stderr
    picked = cotenant("replay", file, "--kind", "migrated", "--json")
    assert picked.stdout.count('"migrated"') > 1, "too little moved to prove anything"
    again = cotenant("replay", "--check", file)
    assert (again.exit_code, again.stdout[:10]) == (0, "identical:"), again.stderr


def test_a_recording_is_the_same_in_either_form(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra `research`")
    scenario = Scenario("sample", "1x8", queue="las")
    lines = []
    for ending in ("jsonl", "parquet"):
        record(scenario, tmp_path / f"a.{ending}")
        recording = Recording(tmp_path / f"a.{ending}")
        lines.append([recording.header_line, *recording.lines(), recording.end])
    assert lines[0] == lines[1]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_scratch_space_is_recorded_of_the_jobs_that_request_it(form: str, tmp_path: Path) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra `research`")
    (tmp_path / "jobs.csv").write_text(
        "job_id,submitted_seconds,work_seconds,gpus,scratch_bytes\n1,0,60,1,0\n2,0,60,1,1073741824\n"
    )
    (tmp_path / "nodes.yaml").write_text("nodes:\n  - {count: 1, gpus: 2, cores: 8, scratch_bytes: 4294967296}\n")
    given = "--trace", tmp_path / "jobs.csv", "--format", "cotenant", "--cluster", tmp_path / "nodes.yaml"
    told = cotenant("simulate", *given, "--events", tmp_path / f"events.{form}")
    assert told.exit_code == 0, told.stderr
    events = map(json.loads, Recording(tmp_path / f"events.{form}").lines())
    starts = {event["job_id"]: event for event in events if event["kind"] == "started"}
    held = {job_id: [place.get("scratch_bytes") for place in start["nodes"]] for job_id, start in starts.items()}
    assert held == {"1": [None], "2": [2**30]}
    assert {job_id: start.get("scratch_bytes") for job_id, start in starts.items()} == {"1": None, "2": 2**30}
    again = cotenant("replay", "--check", tmp_path / f"events.{form}")
    assert (again.exit_code, again.stdout[:10]) == (0, "identical:"), again.stderr


def record(scenario: Scenario, path: Path, watch: Callable[[Simulation], bool] | None = None) -> None:
    with writing(path, scenario) as recorder:
        recorder.end(complete=scenario.run(recorder=recorder, watch=watch).complete)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"at_seconds": "soon"}, "field at_seconds is invalid"),
        ({"at_seconds": float("nan")}, "field at_seconds is invalid"),
        ({"at_seconds": 10**400}, "field at_seconds is invalid"),
        ({"kind": 3}, "field kind is invalid"),
        ({"kind": "eaten"}, "field kind is invalid"),
        ({"gpu_milli": "two"}, "field gpu_milli is invalid"),
        ({"by": "b"}, "field by is invalid"),
        ({"nodes": [{"node": 0}], "run": 1}, "field nodes is invalid"),
        ({"nodes": []}, "field run is missing"),
        ({"kind": "started"}, "field job_id is missing"),
        ({"kind": "planned"}, "field waiting is missing"),
        ({"more": "\ud800"}, "surrogates not allowed"),
        (b'{"at_seconds": 0, "kind": "node_up", "more": "\xed\xa0\x80"}', "can't decode"),
        ([1], "not an object"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_invalid_event_is_reported_with_its_line(
    tmp_path: Path, line: object, told: str, form: tuple[str, ...]
) -> None:
    header = {"kind": "header", "version": 1, "scenario": {"trace": "sample", "cluster": "1x8"}, "files": {}}
    good = {"at_seconds": 0.5, "kind": "node_down", "node": 0}
    file, lines = tmp_path / "a.jsonl", [json.dumps(header).encode(), *[json.dumps(good).encode()] * 5]
    event = {"at_seconds": 0.0, "kind": "submitted", **line} if isinstance(line, dict) else line
    lines[4] = event if isinstance(event, bytes) else json.dumps(event).encode()
    file.write_bytes(b"\n".join(lines))
    shown = cotenant("replay", file, *form)
    assert shown.exit_code == 2, shown.stderr
    assert "line 5: invalid " in shown.stderr
    assert told in shown.stderr


@pytest.mark.parametrize("column", [b"a", datetime.date(2026, 1, 1)])
def test_a_recording_of_other_types_than_it_was_written_with_is_refused(tmp_path: Path, column: object) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `research`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `research`")
    record(Scenario("sample", "1x8"), file := tmp_path / "a.parquet")
    table, kept = parquet.read_table(file), parquet.read_metadata(file).metadata
    other = pyarrow.array([column] * len(table))
    changed = table.set_column(table.column_names.index("job_id"), "job_id", other)
    parquet.write_table(changed.replace_schema_metadata(kept), file)
    with pytest.raises(BadRecording, match=r"cannot be read: Object of type .* is not JSON"):
        list(Recording(file).events())


@pytest.mark.deep
def test_any_changed_byte_is_caught(recorded: Path) -> None:
    if recorded.suffix == ".parquet":
        pytest.skip("some of its bytes mean nothing")
    whole, rng = recorded.read_bytes(), random.Random(0)
    header, end = whole.index(b"\n"), whole.rindex(b"\n", 0, -1)
    spans = [(0, len(whole)), (0, header), (end, len(whole))]
    for at in (rng.randrange(*span) for span in spans for _ in range(amount(8, deep=30))):
        changed = bytes([whole[at] ^ rng.choice([1, 2, 8, 32])])
        recorded.write_bytes(whole[:at] + changed + whole[at + 1 :])
        told = cotenant("replay", "--check", recorded)
        assert told.exit_code in (1, 2), f"byte {at}: {whole[at - 20 : at + 20]!r} became {changed!r}"
        assert "Traceback" not in told.stderr
        assert "something went wrong inside" not in told.stderr, f"byte {at}: {told.stderr}"


@pytest.mark.deep
def test_any_changed_field_of_a_table_is_caught(recorded: Path) -> None:
    if recorded.suffix == ".jsonl":
        pytest.skip("has no fields")
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(recorded) as file:
        rows, schema, metadata = file.read().to_pylist(), file.schema_arrow, file.metadata.metadata
    rng = random.Random(0)
    for name in ("at_seconds", "kind", "job_id", "run", "gpu_milli", "detail", "code", "needs_room", "by"):
        row = rng.choice([row for row in rows if row[name] is not None])
        kept = row[name]
        row[name] = ["j0", "j1", "j2"] if name == "by" else not kept if name == "needs_room" else type(kept)("7")
        with pq.ParquetWriter(recorded, schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema))
            writer.add_key_value_metadata({key: metadata[key] for key in metadata if key.startswith(b"cotenant.")})
        assert cotenant("replay", "--check", recorded).exit_code == 1, name
        row[name] = kept


def test_a_line_more_or_less_is_caught(recorded: Path) -> None:
    if recorded.suffix == ".parquet":
        pytest.skip("has no lines")
    lines = recorded.read_bytes().splitlines(keepends=True)
    for changed in (lines[:5] + lines[6:], lines[:5] + lines[4:], lines + lines[-1:], lines[:-2] + lines[-1:]):
        recorded.write_bytes(b"".join(changed))
        assert cotenant("replay", "--check", recorded).exit_code == 1


def test_the_first_difference_is_shown_in_both_versions(recorded: Path) -> None:
    if recorded.suffix == ".parquet":
        pytest.skip("is not changed with an editor")
    text = recorded.read_text()
    recorded.write_text(text.replace('"run":2', '"run":3', 1))
    told = cotenant("replay", "--check", recorded)
    assert told.exit_code == 1
    assert '"run":3' in told.stderr.split("recorded: ")[1].split("repeated: ")[0]
    assert '"run":2' in told.stderr.split("repeated: ")[1]
    answer = json.loads(cotenant("replay", "--check", "--json", recorded).stdout)
    assert (answer["same"], '"run":2' in answer["difference"]["repeated"]) == (False, True)


def test_a_changed_trace_is_named_and_another_place_can_be_given(recorded: Path) -> None:
    trace = recorded.parent / "jobs.csv"
    moved = trace.rename(recorded.parent / "moved.csv")
    told = cotenant("replay", "--check", recorded)
    assert (told.exit_code, "is missing" in told.stderr, "--trace gives" in told.stderr) == (2, True, True)
    assert cotenant("replay", "--check", recorded, "--trace", moved).exit_code == 0
    trace.write_text(JOBS.replace("j3,", "j33,"))
    told = cotenant("replay", "--check", recorded)
    assert (told.exit_code, "is not the one of" in told.stderr) == (2, True)


def test_what_an_interrupt_leaves_is_marked_and_can_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.simulator.run.WATCH_SECONDS", 0.0)
    file = tmp_path / "part.jsonl"
    record(Scenario("sample", "2x8"), file, watch=lambda simulation: simulation.finished < 40)
    assert json.loads(file.read_text().splitlines()[-1])["complete"] is False
    told = cotenant("replay", "--check", file)
    assert (told.exit_code, "incomplete" in told.stdout) == (0, True)
    assert "incomplete" in cotenant("replay", file).stderr


def test_a_simulation_that_fails_leaves_no_file(tmp_path: Path) -> None:
    scenario = Scenario("sample", "2x8")

    def fails() -> None:
        with writing(tmp_path / "a.jsonl", scenario) as recorder:
            scenario.run(recorder=recorder, trace=load("sample"))
            raise PolicyFailed("queue", object(), "nothing", "no mood")

    with pytest.raises(PolicyFailed):
        fails()
    assert list(tmp_path.iterdir()) == []


def test_events_can_be_picked_by_job_node_and_kind(recorded: Path) -> None:
    def events(*arguments: object) -> list[dict[str, Any]]:
        return list(json.loads(cotenant("replay", recorded, "--json", *arguments).stdout))

    every = events()
    assert len(every) == len(list(Recording(recorded).lines()))
    assert {event["kind"] for event in events("--kind", "started", "--kind", "finished")} == {"started", "finished"}
    story = [event["kind"] for event in events("--job", "j5") if event["kind"] != "planned"]
    assert (story[0], story[-1]) == ("submitted", "finished")
    on_node = events("--node", "1", "--kind", "started")
    assert on_node == [
        event for event in every if event["kind"] == "started" and any(at["node"] == 1 for at in event["nodes"])
    ]
    stops = [event for event in events("--node", "1") if event["kind"] in ("finished", "preempted")]
    assert len(stops) == len(on_node)
    table = cotenant("replay", recorded, "--job", "j5").stdout
    assert "run 1 on node " in table


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("simulate", "--trace", "sample", "--cluster", "2x8", "--events", "a.txt"), "must end in .jsonl or .parquet"),
        (("simulate", "--trace", "sample", "--cluster", "2x8", "--events", "/nowhere/a.jsonl"), "No such file"),
        (("replay", "nowhere.jsonl"), "nowhere.jsonl cannot be read: No such file"),
        (("replay", "nowhere.jsonl", "--kind", "started", "--kind", "strated"), "unknown event kind 'strated'"),
        (("replay", __file__), "must end in .jsonl or .parquet"),
    ],
)
def test_invalid_input_is_reported_in_a_sentence(arguments: tuple[str, ...], told: str) -> None:
    result = cotenant(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]\n", '{"kind":"header"}\n', "\x00\n", '{"kind":"header","version":1}\n')):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(text)
        with pytest.raises(BadRecording):
            Recording(file).scenario()
