from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli.jobs.job_fields import JOB_FIELDS
from cotenant.cli.jobs.job_file import BadJobs, load_jobs, read_jobs
from cotenant.cli.jobs.job_writer import write_jobs
from cotenant.cli.jobs.submit import example_text
from cotenant.cli.outcome import CommandError, ExitCode
from cotenant.codec.specs import spec_to_wire
from cotenant.core.model.job import JobKind, JobSpec, Locality, OpenReplicas, Qos, ReplicaRange, Request, Role
from cotenant.core.model.loss_goal import NO_GOAL, LossGoal
from cotenant.core.model.validation import check_spec

NOW = 1_800_000_000.0


def mistakes(text: str) -> list[str]:
    with pytest.raises(BadJobs) as caught:
        read_jobs(text, "job.yaml", NOW)
    return list(caught.value.details)


def spec_of(text: str) -> JobSpec:
    [draft] = read_jobs(text, "job.yaml", NOW)
    return draft.spec


def test_a_job_without_roles_has_one_role_of_workers() -> None:
    spec = spec_of("gpus: 0.5\ncpus: auto\nmemory: 4GiB\nreplicas: 2\ncommand: [python3, train.py]")
    assert spec.roles == (Role("worker", 2, Request(500, None, memory_bytes=4 * 2**30)),)
    assert spec.kind is JobKind.TRAINING
    assert spec.command == ("python3", "train.py")


def test_a_job_without_gpus_is_a_cpu_job() -> None:
    assert spec_of("cpus: 4\ncommand: [make]").kind is JobKind.CPU


def test_a_command_string_is_run_by_the_shell() -> None:
    assert spec_of("command: |\n  echo a > b\n  cat b\n").command == ("sh", "-c", "echo a > b\ncat b\n")


def test_scalars_mean_what_they_look_like() -> None:
    spec = spec_of("name: 010\nenv: {DEBUG: yes, N: 1.50, EMPTY: ''}\ncommand: [a, 1e3, null_, 0x10]")
    assert spec.name == "010"
    assert dict(spec.environment) == {"DEBUG": "yes", "N": "1.50", "EMPTY": ""}
    assert spec.command == ("a", "1e3", "null_", "0x10")


def test_a_deadline_is_a_time_from_now_or_a_date() -> None:
    assert spec_of("deadline: 2h\ncommand: [a]").deadline_seconds == NOW + 7200
    assert spec_of("deadline: 2030-01-01T00:00:00Z\ncommand: [a]").deadline_seconds == 1_893_456_000


def test_all_mistakes_are_reported_at_once_with_their_positions() -> None:
    text = (
        "gpu: 8\nname: a/b\ngrace: soon\nroles: none\nreplicas: 0\nenv: [A]\n"
        "qos: {latancy: 1s}\nsteps:\ncommand: [a, [b]]"
    )
    assert mistakes(text) == [
        "job.yaml:1:1: unknown job field 'gpu'; did you mean gpus?",
        "job.yaml:2:7: name: must be printable and without slashes, not 'a/b'",
        "job.yaml:3:8: grace: must be a duration such as 30s, 10m or 2h30m, not 'soon'",
        "job.yaml:4:8: roles: must be a list of roles, not a string",
        "job.yaml:5:1: replicas: not allowed beside roles; set it in each role",
        "job.yaml:6:6: env: must be a map of texts, not a list",
        "job.yaml:7:7: unknown qos entry field 'latancy'; did you mean latency?",
        "job.yaml:8:7: steps: value is missing; write '' for an empty text",
        "job.yaml:9:14: command[1]: must be a single value, not a list",
    ]


def test_rules_of_the_queue_point_at_the_fields_that_break_them() -> None:
    text = "kind: cpu\nsignal: KILL\nenv: {COTENANT_X: a}\nroles:\n- {name: W, replicas: 0, gpus: 1.5}\n"
    assert mistakes(text) == [
        "job.yaml:2:9: signal: must be a signal that can be caught, such as SIGUSR1, not 'SIGKILL'",
        "job.yaml:3:7: env.COTENANT_X: this variable is set by the node agent",
        "job.yaml:5:3: roles[0]: nothing to run: neither the role nor the job has a command",
        "job.yaml:5:10: roles[0].name: must be lower-case letters, digits and dashes, not 'W'",
        "job.yaml:5:23: roles[0].replicas: must be from 1 to 4096, not 0",
        "job.yaml:5:32: roles[0].gpus: above one GPU, only whole GPUs are allowed, not 1.5",
    ]


def test_contradictions_are_reported() -> None:
    assert mistakes("kind: cpu\ngpus: 1\ncommand: [a]") == [
        "job.yaml:1:7: kind: a cpu job must not ask for GPUs; this job asks for 1"
    ]


def test_an_unreadable_field_is_reported_once() -> None:
    assert mistakes("kind: training\ngpus: lots\ncommand: [a]") == [
        "job.yaml:2:7: gpus: must be a number of GPUs such as 1, 8 or 0.5, not 'lots'"
    ]


def test_invalid_yaml_is_reported_with_line_and_column() -> None:
    assert mistakes("name: a\ngpus: [1\ncommand: x") == [
        "job.yaml:3:8: invalid YAML: expected ',' or ']', but got ':', while parsing a flow sequence"
    ]
    assert mistakes("name: a\n\x00")[0].startswith("job.yaml:2:1: character not allowed in YAML")
    assert mistakes("[" * 5000) == ["job.yaml: nested too deeply"]


def test_a_recursive_alias_is_rejected() -> None:
    assert mistakes("command: &a [*a]") == ["job.yaml:1:10: invalid YAML: an alias refers to a node that contains it"]


def test_an_alias_is_read_as_its_target() -> None:
    text = (
        "command: [a]\nroles:\n- {name: a, gpus: 1}\n- {name: b, gpus: 1, command: &c [x]}\n"
        "- {name: c, gpus: 1, command: *c}"
    )
    assert [role.command for role in spec_of(text).roles] == [(), ("x",), ("x",)]


SERVICE = "kind: inference\ngpus: 1\ncommand: [a]\n"


def test_replicas_may_be_auto_within_bounds() -> None:
    promise = "qos: {latency: 50ms, percentile: 99, arrivals: 400}\n"
    [role] = spec_of(f"{SERVICE}{promise}replicas: auto\nreplicas_min: 2").roles
    assert (role.replicas, role.open) == (2, OpenReplicas(2, 64))
    [role] = spec_of(f"{SERVICE}{promise}replicas: auto").roles
    assert (role.replicas, role.open) == (1, OpenReplicas(1, 64))


def test_an_elastic_job_has_a_range_of_replicas_in_any_role() -> None:
    [role] = spec_of("gpus: 1\ncommand: [a]\nreplicas: 2..8\nresize: in-place\nscale: weak").roles
    assert (role.replicas, role.elastic, role.open) == (2, ReplicaRange(2, 8), None)
    two = spec_of("command: [a]\nroles: [{name: worker, gpus: 1, replicas: 1..8}, {name: ps, replicas: 1 .. 2}]")
    assert [role.elastic for role in two.roles] == [ReplicaRange(1, 8), ReplicaRange(1, 2)]
    assert spec_of(write_jobs([two])) == two


def test_all_mistakes_in_a_range_of_replicas_are_reported() -> None:
    assert mistakes("gpus: 1\ncommand: [a]\nreplicas: 0..8") == [
        "job.yaml:3:11: replicas: must be from 1 to 4096, not 0"
    ]
    assert mistakes("gpus: 1\ncommand: [a]\nreplicas: 8..4") == [
        "job.yaml:3:11: replicas: must be from 8 to 4096, not 4"
    ]
    assert mistakes("command: [a]\nkind: training\nroles: [{name: ps, gpus: 1, replicas: 1..2}]") == [
        "job.yaml:3:39: roles[0].replicas: parameter servers need a role of workers beside them"
    ]
    assert mistakes("gpus: 1\ncommand: [a]\nreplicas: 1..\nresize: soon")[0].endswith(
        "replicas: must be a whole number, a range such as 1..8, or auto, not '1..'"
    )


def test_all_mistakes_in_auto_replicas_are_reported() -> None:
    assert mistakes("gpus: 1\ncommand: [a]\nreplicas: auto\nreplicas_min: 0\nreplicas_max: 5000") == [
        "job.yaml:1:1: qos.latency_seconds: a service with auto replicas needs a latency target",
        "job.yaml:1:1: qos.latency_percentile: a service with auto replicas needs the percentile at which "
        "its latency target holds",
        "job.yaml:1:1: qos.arrivals_per_second: a service with auto replicas needs the rate at which requests arrive",
        "job.yaml:3:11: replicas: only inference jobs can have auto replicas, not training jobs",
        "job.yaml:4:15: replicas_min: must be from 1 to 4096, not 0",
        "job.yaml:5:15: replicas_max: must be from 1 to 4096, not 5000",
    ]
    assert mistakes(f"{SERVICE}replicas: 3\nreplicas_max: 5") == [
        "job.yaml:5:1: replicas_max: only allowed with `replicas: auto`"
    ]
    assert mistakes(f"{SERVICE}replicas: some")[0].endswith("must be a whole number or auto, not 'some'")
    promise = "qos: {latency: 50ms, percentile: 99, arrivals: 400}\n"
    roles = "roles: [{name: a, gpus: 1, replicas: auto}, {name: b}]"
    assert mistakes(f"kind: inference\ncommand: [a]\n{promise}{roles}") == [
        "job.yaml:4:38: roles[0].replicas: a job with several roles must give the number of replicas of each"
    ]


def test_a_duplicate_field_is_reported() -> None:
    assert mistakes("name: a\nname: b\ncommand: [a]") == ["job.yaml:2:1: name: duplicate field"]
    assert mistakes("env: {A: a, A: b}\ncommand: [a]") == ["job.yaml:1:13: env.A: duplicate key"]


def test_a_field_name_of_other_schedulers_suggests_ours() -> None:
    assert mistakes("environment: {}\ncommand: [a]")[0].endswith("unknown job field 'environment'; did you mean env?")


def test_text_that_is_not_utf8_is_reported() -> None:
    assert mistakes('command: [a, "\\ud800"]') == [
        "job.yaml:1:14: command[1]: contains a character that cannot be encoded in UTF-8"
    ]
    assert mistakes('command: "\\udc00"')[0].endswith("cannot be encoded in UTF-8")


def test_each_document_is_a_job_and_empty_documents_are_skipped() -> None:
    text = "---\nname: a\ncommand: [a]\n---\n---\nname: b\ncommand: [b]\n...\n"
    assert [draft.spec.name for draft in read_jobs(text, "job.yaml", NOW)] == ["a", "b"]


def test_mistakes_of_all_documents_are_reported() -> None:
    assert mistakes("command: [a]\ngpus: x\n---\n- a\n---\ncommand: [a]\nretries: -1") == [
        "job.yaml:2:7: gpus: must be a number of GPUs such as 1, 8 or 0.5, not 'x'",
        "job.yaml:4:1: a job must be a map of fields, not a list",
        "job.yaml:7:10: retries: must be from 0 to 1000, not -1",
    ]


def test_too_many_roles_are_reported_and_not_cut_off() -> None:
    roles = "".join(f"- {{name: r{index}}}\n" for index in range(17))
    assert mistakes(f"command: [a]\nroles:\n{roles}") == ["job.yaml:3:1: roles: must have at most 16 roles, not 17"]


def test_a_file_without_a_job_is_rejected() -> None:
    assert mistakes("# nothing\n") == ["job.yaml: contains no job; see `cotenant submit --example`"]


def test_very_many_mistakes_are_counted() -> None:
    reported = mistakes("\n".join(f"field{index}: 1" for index in range(300)))
    assert len(reported) == 101
    assert reported[-1] == "and 201 more"  # 300 fields, and nothing to run


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("#" * (2**20 + 1))
    with pytest.raises(CommandError, match="larger than 1 MiB") as caught:
        load_jobs(str(path), NOW)
    assert caught.value.code == ExitCode.USAGE


def test_a_file_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: a\ncommand: [\xff]\n")
    with pytest.raises(BadJobs) as caught:
        load_jobs(str(path), NOW)
    assert caught.value.details == (f"{path}:2: not UTF-8 text",)


@pytest.mark.parametrize("path", ["nowhere.yaml", "/"])
def test_a_file_that_cannot_be_read_is_bad_input(path: str) -> None:
    with pytest.raises(CommandError, match="cannot read") as caught:
        load_jobs(path, NOW)
    assert caught.value.code == ExitCode.USAGE


def test_the_example_has_every_field_and_is_valid() -> None:
    drafts = read_jobs(example_text(), "example.yaml", NOW)
    assert [str(draft.spec.kind) for draft in drafts] == ["training", "training", "inference", "cpu"]
    for field in set(JOB_FIELDS) - {"role"}:
        assert f"{field}:" in example_text(), field
    assert all(len(line) <= 120 for line in example_text().splitlines())


def accepted_or_reported(text: str) -> bool:
    """Return whether parsing yields jobs that can be sent, or reported mistakes."""
    try:
        return all(spec_to_wire(draft.spec).ByteSize() for draft in read_jobs(text, "job.yaml", NOW))
    except BadJobs as error:
        return bool(error.details)


@given(st.text())
def test_any_text_is_a_job_or_a_list_of_mistakes(text: str) -> None:
    assert accepted_or_reported(text)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(["8", "2h", "1GiB"])
)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(scalars, inner), max_leaves=8)


@given(st.dictionaries(st.sampled_from(JOB_FIELDS), values))
def test_any_value_of_any_field_is_accepted_or_reported(fields: dict[str, object]) -> None:
    assert accepted_or_reported(yaml.safe_dump(fields))


names = st.text(string.ascii_letters + string.digits + " äß_.:#'\"{}[]~-", max_size=20)
ids = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
commands = st.lists(words, min_size=1, max_size=4).map(tuple)
pairs = st.dictionaries(st.from_regex(r"V[A-Za-z0-9_]{0,8}", fullmatch=True), words, max_size=3)
millis = st.sampled_from([1, 125, 500, 999, 1000, 2000, 64_000])
loss_goals = st.just(NO_GOAL) | st.builds(
    LossGoal, st.none() | st.floats(-1e6, 1e6), st.integers(1, 10**12), st.floats(1e-9, 1e3)
)
durations = st.integers(1, 10**9).map(lambda milliseconds: milliseconds / 1000)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Generate valid jobs."""
    kind = draw(st.sampled_from(JobKind))
    request = st.builds(
        Request,
        gpu_milli=st.just(0) if kind is JobKind.CPU else millis,
        cores=st.none() | st.integers(1, 4096),
        memory_bytes=st.just(0) | st.integers(4 * 2**20, 2**50),
        gpu_type=st.just("") if kind is JobKind.CPU else st.sampled_from(["", "V100", "A100-SXM4-80GB"]),
    )
    role = st.builds(Role, name=ids, replicas=st.integers(1, 64), request=request, command=st.just(()) | commands)
    percentile = draw(st.sampled_from([0.0, 50.0, 99.9]))
    roles = draw(st.lists(role, min_size=1, max_size=3, unique_by=lambda one: one.name))
    if kind is JobKind.INFERENCE and percentile and draw(st.booleans()):
        bounds = OpenReplicas(draw(st.integers(1, 9)), draw(st.integers(9, 4096)))
        roles = [replace(roles[0], replicas=bounds.least, open=bounds)]
    return JobSpec(
        name=draw(names.filter(lambda name: name not in (".", ".."))),
        kind=kind,
        tenant=draw(ids),
        queue=draw(ids),
        roles=tuple(roles),
        command=draw(commands),
        environment=tuple(sorted(draw(pairs).items())),
        working_directory=draw(st.sampled_from(["", "/", "/srv/a b"])),
        model=draw(names.filter(lambda name: name not in (".", ".."))),
        steps_total=draw(st.integers(0, 2**63 - 1)),
        deadline_seconds=draw(st.none() | st.integers(int(NOW) + 1, 2**32).map(float)),
        qos=Qos(
            rate_min_per_second=draw(st.floats(0, 1e6)),
            latency_seconds=draw(durations) if percentile else 0.0,
            latency_percentile=percentile,
            arrivals_per_second=draw(st.floats(0, 1e6)),
        ),
        priority=draw(st.integers(-1_000_000, 1_000_000)),
        preemptible=draw(st.booleans()),
        grace_seconds=draw(st.integers(0, 86_400_000).map(lambda milliseconds: milliseconds / 1000)),
        warning_signal=draw(st.sampled_from(["SIGTERM", "SIGUSR1"])),
        retries_max=draw(st.integers(0, 1000)),
        locality=draw(st.none() | st.sampled_from(Locality)),
        profiled=draw(st.booleans()),
        best_effort=draw(st.booleans()),
        stop_after_disconnected_seconds=draw(st.none() | durations),
        pre_run_seconds=draw(st.none() | durations),
        time_limit_seconds=draw(st.none() | durations),
        pids_max=draw(st.just(0) | st.integers(16, 4_194_304)),
        progress_regex=draw(st.sampled_from(["", r"step (\d+)", r"'(?P<loss>x)': \"(y)"])),
        labels=tuple(sorted(draw(st.dictionaries(names.filter(lambda name: name.strip(". ")), names)).items())),
        expected_seconds=draw(st.none() | durations),
        loss_goal=draw(loss_goals),
    )


@given(st.lists(specs(), min_size=1, max_size=3))
def test_jobs_read_as_they_were_written(jobs: list[JobSpec]) -> None:
    sound = [job for job in jobs if not check_spec(job, now=NOW)]
    if sound:
        assert [draft.spec for draft in read_jobs(write_jobs(sound), "job.yaml", NOW)] == sound
