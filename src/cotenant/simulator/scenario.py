"""All inputs of a simulation as strings, so that a command line, another process or a recording can carry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from cotenant.core.model.tenancy import Tenant
from cotenant.core.policy.options import split_names
from cotenant.core.policy.profiles import Profile
from cotenant.simulator import snapshots
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.prediction_arms import Recorded
from cotenant.simulator.recording.events import Recorder
from cotenant.simulator.results import Result
from cotenant.simulator.run import Prepared, Watch, prepare, simulate
from cotenant.simulator.traces import SNAPSHOT, Trace, load

CONTENDING = {"bandwidth", "colocation"}  # the models of speed in which jobs slow each other down
DECIDING = ("queue", "placement", "allocator")  # the groups whose policies continue from a snapshot


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace, a cluster, tenants, the policies by name with their options as strings by group, and a seed.

    `format` None: detected from the trace's header. The same scenario gives the same result.
    """

    trace: str
    cluster: str
    format: str | None = None
    skip_bad_rows: bool = False
    queue: str = "fifo"
    placement: str = "consolidate"
    allocator: str = "requested"
    predictor: str = "oracle"
    contention: str = "none"
    tenants: tuple[Tenant, ...] = ()
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seed: int = 0
    overlay: str = ""
    recorded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # options of a snapshot's policies

    @classmethod
    def of_snapshot(cls, path: Path | str) -> Self:
        """Return a scenario that continues a snapshot under its policies and rules, with what was known then.

        Contention is not recorded in a snapshot, so there is none to relieve unless a scenario adds it.

        Raises:
            BadSnapshot: the snapshot is invalid.
        """
        return cls.of_taken(snapshots.read(path), str(path))

    @classmethod
    def of_taken(cls, taken: snapshots.Snapshot, path: str) -> Self:
        """Return the scenario of a snapshot that is already read from a path."""
        names = {group: used.name for group, used in taken.policies.items() if group in DECIDING}
        options = {group: dict(taken.policies[group].options) for group in names if taken.policies[group].options}
        if taken.rules:
            options["simulator"] = dict(taken.rules)
        base = cls(path, path, SNAPSHOT, predictor=Recorded.name, tenants=taken.tenants)
        return replace(base.choosing(names, options), recorded=options)

    def as_arm(self, names: Mapping[str, str], options: Mapping[str, Mapping[str, str]]) -> Self:
        """Return the scenario with other policies by group and more options.

        Options stay, as they are shared by all arms, but for those that a snapshot recorded of a replaced policy.
        """
        replaced = [group for group, name in names.items() if name != getattr(self, group)]
        merged = {group: dict(given) for group, given in self.options.items()}
        for group in replaced:
            left = self.recorded.get(group, {}).items()
            merged[group] = {key: value for key, value in merged.get(group, {}).items() if (key, value) not in left}
        for group, given in options.items():
            merged.setdefault(group, {}).update(given)
        kept = {group: given for group, given in merged.items() if given}
        return replace(self, options=kept, **names)  # type: ignore[arg-type]  # names of policies, which are texts

    def choosing(self, names: Mapping[str, str], options: Mapping[str, Mapping[str, str]]) -> Self:
        """Return the scenario with other policies by group and more options; replaced policies lose their options."""
        same = [group for group in self.options if names.get(group) in (None, getattr(self, group, None))]
        kept = {group: self.options[group] for group in same}
        merged = {group: {**kept.get(group, {}), **options.get(group, {})} for group in (*kept, *options)}
        return replace(self, options=merged, **names)  # type: ignore[arg-type]  # names of policies, which are texts

    def under(self, profile: Profile) -> Self:
        """Return the scenario with all policies of a profile; jobs that cannot contend need no contention policy."""
        speed = self.options.get("simulator", {}).get("speed", "")
        names = profile.names() if CONTENDING & set(split_names(speed)) else profile.names({"contention": "none"})
        return self.choosing(names, profile.options_with(names))

    def deciding_by(self, profile: Profile) -> Self:
        """Return the scenario with a profile's policies, which know what those in use know: the estimates stay."""
        names = profile.names({"predictor": self.predictor, "contention": self.contention})
        return self.choosing(names, profile.options_with(names))

    def read(self, *, watch: Callable[[int], None] | None = None) -> Trace:
        """Return the trace without overlays; `watch` receives the number of rows read. Raises BadTrace."""
        return load(self.trace, self.format, skip_bad_rows=self.skip_bad_rows, watch=watch)

    def run(
        self, *, watch: Watch | None = None, recorder: Recorder | None = None, trace: Trace | None = None
    ) -> Result:
        """Simulate it; `trace` is the scenario's own if already read. Raises what `simulate` raises."""
        return simulate(
            self.trace if trace is None else trace,
            self.cluster,
            **self._decisions(),
            overlay=self.overlay,
            format_name=self.format,
            skip_bad_rows=self.skip_bad_rows,
            watch=watch,
            recorder=recorder,
        )

    def prepare(self, trace: Trace, cluster: Cluster, recorder: Recorder) -> Prepared:
        """Return the simulation before its first event, of a trace and cluster already read."""
        return prepare(trace, cluster, **self._decisions(), recorder=recorder)

    def _decisions(self) -> dict[str, Any]:
        """Return the arguments of a simulation that say how it decides."""
        names = ("queue", "placement", "allocator", "predictor", "contention", "tenants", "options", "seed")
        return {name: getattr(self, name) for name in names}

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; options are sorted by name."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        options = {group: dict(sorted(self.options[group].items())) for group in sorted(self.options)}
        return plain | {"options": options, "tenants": [asdict(tenant) for tenant in self.tenants]}
