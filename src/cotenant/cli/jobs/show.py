"""`cotenant show`: everything known about a job."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.arrays import array_summary, counts, indices_of
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.estimate_view import estimate_card, estimate_view
from cotenant.cli.jobs.job_fields import FORMS
from cotenant.cli.jobs.job_lines import exit_line
from cotenant.cli.name_lookup import find_job_or_array, phase_of, read_tasks
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.render import print_card
from cotenant.cli.sessions.held_command import shown_command
from cotenant.codec.dependencies import condition_of
from cotenant.codec.specs import (
    fields_from_wire,
    mounts_from_wire,
    secrets_from_wire,
    spec_from_wire,
    triggers_from_wire,
)
from cotenant.core.model.dependencies import Condition
from cotenant.core.model.job_fields import JOB
from cotenant.core.model.lifecycle import ENDED
from cotenant.core.model.refusal import gpus, plural
from cotenant.core.model.resources import ResourceKind, present
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job, JobSpec, LossGoal, Qos, Role
from cotenant.v1.job_service_pb2 import ExplainJobRequest, ExplainJobResponse

CORES_SHOWN_MAX = 12
PRE_RUN = "pre-run on one GPU"
AFTER_WORDS = {
    Condition.AFTER: "after",
    Condition.AFTER_OK: "after success of",
    Condition.AFTER_FAIL: "after failure of",
    Condition.AFTER_STARTED: "after start of",
}
Pairs = Iterator[tuple[str, str]]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show")(show)


def show(
    context: typer.Context,
    job_id: options.JobId,
    as_file: Annotated[bool, typer.Option("--file", help="Print a job file that submits the same job.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show everything known about a job or an array.

    \b
    Examples:
      cotenant show ID
      cotenant show --file ID > again.yaml
    """
    job, estimate, tasks = with_mesh(Flags.of(context), lambda mesh: _read(mesh, job_id, all_tasks=as_json), unary=True)
    if isinstance(job, Array):
        _show_array(job, tasks, as_file, as_json)
    elif as_file:
        if job.archived:
            note("archived jobs have no environment variables: `env` is missing in this file")
        _note_secrets(job.spec)
        print(_written(job.spec), end="")
    elif as_json:
        views.print_json({**views.job_view(job, time.time()), "estimate": estimate})
    else:
        print_card([*_card(job, time.time()), *(estimate_card(estimate) if estimate else ())])


async def _read(mesh: Mesh, job_id: str, *, all_tasks: bool) -> tuple[Job | Array, views.View | None, list[Job]]:
    """Return a job and its estimate unless it has ended; or an array and, if wanted, all of its jobs."""
    job = await find_job_or_array(mesh, job_id)
    if isinstance(job, Array) and job.archived:
        hint = f"list them with `cotenant history --id {job.id}` on the queue's machine"
        raise usage_error(f"array {job.id} is archived, with {plural(job.job_count, 'job')}", hint=hint)
    if isinstance(job, Array):
        return job, None, await read_tasks(mesh, job.id) if all_tasks else []
    if phase_of(job) in ENDED:
        return job, None, []
    answer: ExplainJobResponse = await mesh.jobs.ExplainJob(ExplainJobRequest(id=job.id))
    return job, estimate_view(answer.estimate) if answer.HasField("estimate") else None, []


def _note_secrets(spec: JobSpec) -> None:
    if spec.notify:
        note(
            f"the queue shows only the hosts of {plural(len(spec.notify), 'target')}: `notify` is missing in this file"
        )


def _written(spec: JobSpec) -> str:
    """Return the job file of a spec."""
    from cotenant.cli.jobs.job_writer import write_jobs  # with YAML

    return write_jobs([replace(spec_from_wire(spec), notify=())])


def _show_array(array: Array, tasks: list[Job], as_file: bool, as_json: bool) -> None:
    now, wanted = time.time(), indices_of(array)
    if as_file:
        _note_secrets(array.spec)
        print(_written(array.spec), end="")
    elif as_json:
        jobs = [views.job_view(job, now) for job in tasks]
        views.print_json({"id": array.id, "array": str(wanted), "phases": counts(array), "jobs": jobs})
    else:
        print_card(_array_card(array, str(replace(wanted, running_max=0))))


def _array_card(array: Array, indices: str) -> Pairs:
    spec = array.spec
    yield "id", array.id
    yield "name", spec.name
    yield "array", f"{plural(array.job_count, 'job')}: {indices}"
    yield "running at most", str(spec.array.running_max or "")
    yield "jobs", array_summary(array)
    yield "tenant, queue", f"{spec.tenant}, {spec.queue}"
    yield from _spec_lines(spec)
    yield "submitted", views.time_of(array, "create_time") or ""
    yield "submitted by", array.submitter
    yield "ended", views.time_of(array, "end_time") or ""


def _card(job: Job, now: float) -> Pairs:
    view = views.job_view(job, now)
    yield "id", view["id"]
    yield "name", view["name"]
    yield "phase", f"{view['phase']}{': ' if view['phase_reason'] else ''}{view['phase_reason']}"
    if view["reason"]:
        yield "waits for", f"{view['reason']['code']}: {view['reason']['detail']}"
        yield "remedy", view["reason"]["remedy"]
    if array := view["array"]:
        yield "array", f"{array['id']}, index {array['index']} of {array['count']} jobs"
    yield "archived", "yes, without its environment" if view["archived"] else ""
    yield "kind", view["kind"]
    yield "tenant, queue", f"{view['tenant']}, {view['queue']}"
    yield from _spec_lines(job.spec)
    yield from objective_card(view)
    yield from _times(view)
    yield from _progress_lines(view)
    yield from _attempt(view)


def _amount(kind: ResourceKind, size: int) -> str:
    """Return an amount that a replica requests; memory is understood without its noun."""
    return units.short_bytes(size) + (f" of {kind.noun}" if kind.optional else "")


def _replicas(role: Role) -> str:
    if role.HasField("open"):
        return f"{role.replicas} (auto, {role.open.min} to {role.open.max})"
    if role.HasField("elastic"):
        return f"{role.replicas} (elastic, {role.elastic.min} to {role.elastic.max})"
    return str(role.replicas)


def _spec_lines(spec: JobSpec) -> Pairs:
    """Yield what the user requested."""
    for role in spec.roles:
        requests = role.resources
        cores = plural(requests.cores, "core") if requests.HasField("cores") else "auto cores"
        amounts = "".join(f", {_amount(kind, size)}" for kind, size in present(requests) if size)
        kind = f" {requests.gpu_type}" if requests.gpu_type else ""
        yield f"role {role.name}", f"{_replicas(role)} × ({gpus(requests.gpu_milli)}{kind}, {cores}{amounts})"
    yield "command", shlex.join(shown_command(spec.command))
    lines = field_lines(spec)
    yield from ((label, lines.pop(label, "")) for label in ("model", "priority", "preemptible"))
    yield "locality", views.locality_of(spec)
    yield "labels", ", ".join(f"{key}={value}" for key, value in sorted(spec.labels.items()))
    for condition, word in AFTER_WORDS.items():
        yield word, ", ".join(one.id for one in spec.dependencies if condition_of(one) is condition)
    yield from ((label, lines.pop(label, "")) for label in ("deadline", "working directory"))
    yield "submitted from", spec.submit_directory.path
    yield "Python environment", views.python_environment_of(spec)
    yield "progress rule", lines.pop("progress rule", "")
    yield "goal", _goal(spec.loss_goal)
    yield "objectives", _objectives(spec.qos)
    yield "secrets", ", ".join(map(str, secrets_from_wire(spec)))
    yield "mounts", ", ".join(map(str, mounts_from_wire(spec)))
    yield "notify", ", ".join(spec.notify)
    yield "notify on", ", ".join(triggers_from_wire(spec.notify_on))
    yield from lines.items()


def field_lines(spec: JobSpec) -> dict[str, str]:
    """Return what differs from the defaults, by label, for the fields of the table that are shown by themselves."""
    values = fields_from_wire(spec)
    return {
        field.shown: field.shown_as.format(FORMS[field.type].show(values[field.attribute]))
        for field in JOB
        if field.shown and values.get(field.attribute, field.default) != field.default
    }


def _goal(goal: LossGoal) -> str:
    parts = [f"a loss of {goal.target:g}"] if goal.HasField("target") else []
    if goal.fall_steps:
        parts.append(f"{goal.fall_steps} steps that lower the loss by less than {goal.fall_min:g}")
    return ", or ".join(parts)


def _objectives(qos: Qos) -> str:
    parts = []
    if qos.rate_min_per_second:
        parts.append(f"at least {qos.rate_min_per_second:g} steps per second")
    if qos.latency_seconds:
        parts.append(f"latency {units.write_seconds(qos.latency_seconds)} at percentile {qos.latency_percentile:g}")
    if qos.arrivals_per_second:
        parts.append(f"at {qos.arrivals_per_second:g} requests per second")
    return ", ".join(parts)


def objective_card(view: views.View) -> Pairs:
    """Yield the status of each objective, and what was expected of it at submission."""
    if not view["objectives"]:
        return
    from cotenant.cli.objective_views import objective_lines  # few jobs have objectives

    yield from (("objective", line) for line in objective_lines(view["objectives"]))
    yield from (("at submission", line) for line in objective_lines(view["submitted_objectives"]))


def _times(view: views.View) -> Pairs:
    yield "submitted", view["create_time"] or ""
    yield "submitted by", view["submitter"]
    yield "waited", units.short_seconds(view["wait_seconds"])
    yield "started", view["start_time"] or ""
    yield "ran", units.short_seconds(view["run_seconds"]) if view["run_seconds"] else ""
    yield "ended", view["end_time"] or ""


def _progress_lines(view: views.View) -> Pairs:
    """Yield the progress of a job, and what it has consumed."""
    yield "throttled", views.throttle_of(view)
    progress = view["progress"]
    if progress and (
        progress["step"] or progress["rate_per_second"] or progress["loss"] is not None or not progress["throttle"]
    ):
        of = f" of {progress['steps']}" if progress["steps"] else ""
        loss = "" if progress["loss"] is None else f", loss {progress['loss']:g}"
        yield "progress", f"step {progress['step']}{of}, {progress['rate_per_second']:g} per second{loss}"
    for tracker, run in (progress or {}).get("tracked_runs", {}).items():
        yield f"{tracker} run", run
    yield "GPU-hours", f"{view['attained_gpu_seconds'] / 3600:.3g}" if view["attained_gpu_seconds"] else ""
    yield "failures", f"{view['failures']} (at most {view['retries']} are retried)" if view["failures"] else ""
    yield "launch failures", f"{view['launch_failures']} (not counted as failures)" if view["launch_failures"] else ""
    yield "preemptions", str(view["preemptions"] or "")
    yield "migrations", str(view["migrations"] or "")
    for one in view["avoided_nodes"]:
        yield "avoids node", f"{one['node']} until {one['until']}: {one['reason']}"


def _attempt(view: views.View) -> Pairs:
    """Yield the attempts, and what the last one holds or held."""
    for past in view["past_attempts"]:
        words = [
            past["state"],
            resized_in_words(past),
            PRE_RUN * past["pre_run"],
            past["message"],
            exit_line(past["exit"]) if past["exit"] else "",
        ]
        yield f"attempt {past['number']}", "; ".join(word for word in words if word)
    attempt = view["attempt"]
    if not attempt:
        return
    pre_run = f", {PRE_RUN}" if attempt["pre_run"] else ""
    yield "attempt", f"{attempt['number']}, {attempt['state']}{pre_run}"
    yield "message", attempt["message"]
    if failure := attempt["failure"]:
        yield "failure", ": ".join(filter(None, (f"{failure['class']} ({failure['blame']})", failure["evidence"])))
    if attempt["exit"]:
        yield "exit", exit_line(attempt["exit"])
    for allocation in attempt["allocations"]:
        for task in allocation["tasks"]:
            yield f"rank {task['rank']}", f"{allocation['node']}: {held_resources(task)}"


def resized_in_words(attempt: views.View) -> str:
    """Return with how many replicas an elastic job went on after an attempt, and why; "" if it was not resized."""
    if not attempt["next_replicas"]:
        return ""
    return f"resized to {plural(attempt['next_replicas'], 'replica')}: {attempt['stop_detail']}"


def held_resources(task: views.View) -> str:
    """Return the resources that a task holds, cores as ranges, with a resize in progress.

    >>> task = {"cores": [0, 1, 2, 5], "gpus": [{"uuid": "GPU-1", "share": 0.5}], "reclaimable": False}
    >>> held_resources(task | {"lent_cores": 1, "target_cores": 3})
    'cores 0-2,5 (1 lent), resizing to 3 cores; 0.5 of GPU-1'
    """
    lent = f" ({task['lent_cores']} lent)" if task["lent_cores"] else ""
    change = f", resizing to {plural(task['target_cores'], 'core')}" if task["target_cores"] else ""
    parts = [f"cores {ranges(task['cores'])}{lent}{change}"] if task["cores"] else []
    parts += [
        f"{share['share']:g} of {share['uuid']}" if share["share"] != 1 else share["uuid"] for share in task["gpus"]
    ]
    return "; ".join([*parts, "reclaimable"] if task["reclaimable"] else parts)


def ranges(numbers: list[int]) -> str:
    """Return numbers in the kernel's cpuset notation.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
