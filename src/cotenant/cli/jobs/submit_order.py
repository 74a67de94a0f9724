"""The order in which jobs of one submission go: those that wait for others by name come after them.

>>> from cotenant.cli.jobs.job_file import read_jobs
>>> text = "name: b\\nafter: a\\ncommand: [b]\\n---\\nname: a\\ncommand: [a]"
>>> [(step.draft.spec.name, step.after) for step in arrange(read_jobs(text, "jobs.yaml", now=0.0))]
[('a', {}), ('b', {0: 1})]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.cli.jobs.job_file import BadJobs, Draft, Mistake
from cotenant.core.model.dependencies import Circle, in_order
from cotenant.core.model.job import JobSpec
from cotenant.core.model.validation import shown


@dataclass(frozen=True, slots=True)
class Step:
    """A job to be submitted; `after` names, of its dependencies, those that are jobs of the same submission."""

    draft: Draft
    number: int  # its place in what was read
    after: Mapping[int, int] = field(default_factory=dict)  # numbers of other jobs, by the dependency's place

    def spec(self, ids: Mapping[int, str]) -> JobSpec:
        """Say what to submit, with ids for names; a job that has no id yet is not waited for."""
        dependencies = tuple(
            replace(one, job_id=ids[self.after[place]]) if place in self.after else one
            for place, one in enumerate(self.draft.spec.dependencies)
            if place not in self.after or self.after[place] in ids
        )
        return replace(self.draft.spec, dependencies=dependencies)

    def with_ids(self, ids: Mapping[int, str]) -> Step:
        """The same with what was found for those of its dependencies that stand there."""
        dependencies = tuple(
            replace(one, job_id=ids.get(place, one.job_id)) for place, one in enumerate(self.draft.spec.dependencies)
        )
        return replace(self, draft=replace(self.draft, spec=replace(self.draft.spec, dependencies=dependencies)))

    def others(self) -> list[tuple[int, str]]:
        """Its dependencies on jobs that have been submitted before, by place."""
        named = enumerate(self.draft.spec.dependencies)
        return [(place, one.job_id) for place, one in named if place not in self.after]


def arrange(drafts: Sequence[Draft]) -> list[Step]:
    """Put jobs in an order in which each comes after those that it waits for; else they keep theirs.

    Raises:
        BadJobs: some wait for each other, or for a name that several have.
    """
    named: dict[str, list[int]] = {}
    for number, draft in enumerate(drafts):
        if draft.spec.name:
            named.setdefault(draft.spec.name, []).append(number)
    mistakes: list[Mistake] = []
    steps = [_step(number, draft, named, drafts, mistakes) for number, draft in enumerate(drafts)]
    if not mistakes:
        try:
            order = in_order({step.number: list(step.after.values()) for step in steps})
            return [steps[number] for number in order]
        except Circle as circle:
            mistakes.append(_circle(circle, steps))
    raise BadJobs(", ".join(dict.fromkeys(draft.place.source for draft in drafts)), mistakes)


def _step(
    number: int, draft: Draft, named: Mapping[str, list[int]], drafts: Sequence[Draft], mistakes: list[Mistake]
) -> Step:
    after: dict[int, int] = {}
    for place, dependency in enumerate(draft.spec.dependencies):
        meant = named.get(dependency.job_id, [])
        if len(meant) > 1:
            where = ", ".join(str(drafts[other].place) for other in meant)
            message = f"{shown(dependency.job_id)} is the name of {len(meant)} jobs: {where}"
            mistakes.append(draft.mistake(f"spec.dependencies[{place}].id", message))
        elif meant:
            after[place] = meant[0]
    return Step(draft, number, after)


def _circle(circle: Circle, steps: Sequence[Step]) -> Mistake:
    """Point at where the first one of a circle says that it waits, and tell the whole of it."""
    first = min(range(len(circle.members)), key=circle.members.__getitem__)
    members = [*circle.members[first:], *circle.members[:first]]
    names = [f"{steps[one].draft.spec.name} ({steps[one].draft.place})" for one in members]
    step = steps[members[0]]
    place = next(place for place, other in step.after.items() if other == members[1 % len(members)])
    if len(members) == 1:
        return step.draft.mistake(f"spec.dependencies[{place}].id", "waits for itself")
    told = " waits for ".join([*names, steps[members[0]].draft.spec.name])
    return step.draft.mistake(f"spec.dependencies[{place}].id", f"is a circle: {told}")
