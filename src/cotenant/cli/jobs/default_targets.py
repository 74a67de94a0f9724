"""Targets of notifications for jobs that name none: those of the submitter's configuration file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.jobs.user_defaults import UserDefaults
from cotenant.cli.outcome import usage_error
from cotenant.core.model.job import JobSpec
from cotenant.core.model.notification import Trigger
from cotenant.core.model.validation import notify_violations


def with_default_targets(drafts: Iterable[Draft], defaults: UserDefaults) -> list[Draft]:
    """Return the jobs with the submitter's targets where they name none.

    Raises:
        CommandError: the configuration file has invalid targets; names each.
    """
    triggers = [word for word in defaults.notify_on if word not in list(Trigger)]
    wrong = [f"{violation.field}: {violation.description}" for violation in notify_violations(defaults.notify)]
    wrong += [f"notify_on: must be of {', '.join(Trigger)}, not {word!a}" for word in triggers]
    if wrong:
        raise usage_error(f"{defaults.path} has invalid settings", details=wrong)
    return [replace(draft, spec=_with_defaults(draft.spec, defaults)) for draft in drafts]


def without_targets(drafts: Iterable[Draft]) -> list[Draft]:
    """Return the jobs without notifications."""
    return [replace(draft, spec=replace(draft.spec, notify=(), notify_on=())) for draft in drafts]


def _with_defaults(spec: JobSpec, defaults: UserDefaults) -> JobSpec:
    if spec.notify or not defaults.notify:
        return spec
    return replace(spec, notify=defaults.notify, notify_on=spec.notify_on or tuple(map(Trigger, defaults.notify_on)))
