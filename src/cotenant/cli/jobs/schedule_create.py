"""Creates a schedule for `cotenant submit --every`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.jobs.schedules import OVERLAPS, schedule_view, time_text
from cotenant.cli.jobs.submit_order import Step, order_steps
from cotenant.cli.outcome import CommandError, note, usage_error
from cotenant.codec.errors import Problem, from_error
from cotenant.core.model.validation import Violation
from cotenant.v1.schedule_service_pb2 import CreateScheduleRequest, CreateScheduleResponse, Schedule

PREFIX = "schedule."
Resolve = Callable[[Mesh, Sequence[Step]], Awaitable[list[Step]]]
Reject = Callable[[Sequence[tuple[Draft, Problem]]], CommandError]


def create_schedule(
    flags: Flags,
    drafts: Sequence[Draft],
    when: tuple[str, str, str],
    request_id: str,
    dry_run: bool,
    as_json: bool,
    of_submit: tuple[Resolve, Reject],
) -> None:
    """Create the schedule of one job, and print its id; `when` is the recurrence, the time zone and the overlap rule.

    `of_submit` are the functions of `submit` that resolve dependencies and explain a rejection.

    Raises:
        CommandError: the options contradict each other, or the mesh refuses the schedule.
    """
    every, time_zone, overlap = when
    resolve_ids, rejection = of_submit
    if not every:
        raise usage_error("--time-zone and --overlap need --every")
    if overlap and overlap not in OVERLAPS:
        raise usage_error(f"--overlap must be one of {', '.join(OVERLAPS)}, not {overlap!r}")
    if len(drafts) != 1:
        raise usage_error(f"--every takes one job, not {len(drafts)}", hint="submit each job with its own --every")
    [draft] = drafts
    if draft.like:
        raise usage_error("--every cannot be combined with --like", hint="write the job with `cotenant show ID --yaml`")

    async def work(mesh: Mesh) -> Schedule:
        [step] = await resolve_ids(mesh, order_steps(drafts))
        schedule = Schedule(spec=draft.to_wire(step.spec({})), every=every, time_zone=time_zone)
        schedule.overlap = OVERLAPS[overlap or "skip"]
        request = CreateScheduleRequest(schedule=schedule, request_id=request_id, validate_only=dry_run)
        try:
            answer: CreateScheduleResponse = await mesh.schedules.CreateSchedule(request)
            return answer.schedule
        except grpc.aio.AioRpcError as error:
            raise rejection([(draft, schedule_problem(from_error(error)))]) from error

    made = with_mesh(flags, work)
    if as_json:
        from cotenant.cli import views

        views.print_json(schedule_view(made))
    elif dry_run:
        print("the schedule is valid")
    else:
        print(made.id)
        note(f"the first job is submitted at {time_text(made, 'next_time')}; see `cotenant schedules`")


def schedule_problem(problem: Problem) -> Problem:
    """Return the refusal of a schedule with the fields as its caller named them: those of its job, and its own."""
    problem.violations = tuple(Violation(one.field.removeprefix(PREFIX), one.description) for one in problem.violations)
    return problem
