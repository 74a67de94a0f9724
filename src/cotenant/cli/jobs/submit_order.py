"""The order in which the jobs of one submission are created: jobs that depend on others by name come after them.

>>> from cotenant.cli.jobs.job_file import read_jobs
>>> text = "name: b\\nafter: a\\ncommand: [b]\\n---\\nname: a\\ncommand: [a]"
>>> [(step.draft.spec.name, step.after) for step in order_steps(read_jobs(text, "jobs.yaml", now=0.0))]
[('a', {}), ('b', {0: 1})]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.cli.jobs.job_file import BadJobs, Draft, Mistake
from cotenant.core.model.dependencies import DependencyCycle, topological_order
from cotenant.core.model.job import JobSpec
from cotenant.core.model.validation import shown


@dataclass(frozen=True, slots=True)
class Step:
    """A job to submit; `after` holds its dependencies on jobs of the same submission."""

    draft: Draft
    number: int  # its position in the input
    after: Mapping[int, int] = field(default_factory=dict)  # numbers of other jobs, by the dependency's position

    def spec(self, ids: Mapping[int, str]) -> JobSpec:
        """Return the spec to submit, with names replaced by ids; dependencies on jobs without an id are omitted."""
        dependencies = tuple(
            replace(one, job_id=ids[self.after[place]]) if place in self.after else one
            for place, one in enumerate(self.draft.spec.dependencies)
            if place not in self.after or self.after[place] in ids
        )
        return replace(self.draft.spec, dependencies=dependencies)

    def with_ids(self, ids: Mapping[int, str]) -> Step:
        """Return the step with the ids of the dependencies at the given positions replaced."""
        dependencies = tuple(
            replace(one, job_id=ids.get(place, one.job_id)) for place, one in enumerate(self.draft.spec.dependencies)
        )
        return replace(self, draft=replace(self.draft, spec=replace(self.draft.spec, dependencies=dependencies)))

    def others(self) -> list[tuple[int, str]]:
        """Return its dependencies on jobs submitted earlier, with their positions."""
        named = enumerate(self.draft.spec.dependencies)
        return [(place, one.job_id) for place, one in named if place not in self.after]


def order_steps(drafts: Sequence[Draft]) -> list[Step]:
    """Return the jobs in dependency order; independent jobs keep their order.

    Raises:
        BadJobs: jobs depend on each other in a cycle, or on an ambiguous name.
    """
    named: dict[str, list[int]] = {}
    for number, draft in enumerate(drafts):
        if draft.spec.name:
            named.setdefault(draft.spec.name, []).append(number)
    mistakes: list[Mistake] = []
    steps = [_step(number, draft, named, drafts, mistakes) for number, draft in enumerate(drafts)]
    if not mistakes:
        try:
            order = topological_order({step.number: list(step.after.values()) for step in steps})
            return [steps[number] for number in order]
        except DependencyCycle as cycle_error:
            mistakes.append(_cycle_mistake(cycle_error, steps))
    raise BadJobs(", ".join(dict.fromkeys(draft.place.source for draft in drafts)), mistakes)


def _step(
    number: int, draft: Draft, named: Mapping[str, list[int]], drafts: Sequence[Draft], mistakes: list[Mistake]
) -> Step:
    after: dict[int, int] = {}
    for place, dependency in enumerate(draft.spec.dependencies):
        named_jobs = named.get(dependency.job_id, [])
        if len(named_jobs) > 1:
            where = ", ".join(str(drafts[other].place) for other in named_jobs)
            message = f"{shown(dependency.job_id)} is ambiguous; {len(named_jobs)} jobs have that name: {where}"
            mistakes.append(draft.mistake(f"spec.dependencies[{place}].id", message))
        elif named_jobs:
            after[place] = named_jobs[0]
    return Step(draft, number, after)


def _cycle_mistake(cycle_error: DependencyCycle, steps: Sequence[Step]) -> Mistake:
    """Return the mistake for a dependency cycle, positioned at the first job in it."""
    first = min(range(len(cycle_error.members)), key=cycle_error.members.__getitem__)
    members = [*cycle_error.members[first:], *cycle_error.members[:first]]
    names = [f"{steps[one].draft.spec.name} ({steps[one].draft.place})" for one in members]
    step = steps[members[0]]
    place = next(place for place, other in step.after.items() if other == members[1 % len(members)])
    if len(members) == 1:
        return step.draft.mistake(f"spec.dependencies[{place}].id", "depends on itself")
    cycle = " → ".join([*names, steps[members[0]].draft.spec.name])
    return step.draft.mistake(f"spec.dependencies[{place}].id", f"dependency cycle: {cycle}")
