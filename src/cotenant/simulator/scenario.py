"""All that decides a simulation, in words: as a command line, another process or a recording can carry it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cotenant.core.tenancy import Tenant
from cotenant.simulator.recording import Recorder
from cotenant.simulator.results import Result
from cotenant.simulator.run import Watch, simulate
from cotenant.simulator.traces import Trace, load


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace, a cluster, tenants, the policies by name with their options as texts by group, and a seed.

    `format` None: the trace's header tells. The same scenario gives the same result.
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

    def read(self, *, watch: Callable[[int], None] | None = None) -> Trace:
        """Read the trace alone, as its file tells it; `watch` is told how many rows were read. Raises BadTrace."""
        return load(self.trace, self.format, skip_bad_rows=self.skip_bad_rows, watch=watch)

    def run(
        self, *, watch: Watch | None = None, recorder: Recorder | None = None, trace: Trace | None = None
    ) -> Result:
        """Simulate it; `trace` is the scenario's own where that was read before. Raises what `simulate` raises."""
        return simulate(
            self.trace if trace is None else trace,
            self.cluster,
            queue=self.queue,
            placement=self.placement,
            allocator=self.allocator,
            predictor=self.predictor,
            contention=self.contention,
            tenants=self.tenants,
            options=self.options,
            seed=self.seed,
            overlay=self.overlay,
            format_name=self.format,
            skip_bad_rows=self.skip_bad_rows,
            watch=watch,
            recorder=recorder,
        )

    def as_json(self) -> dict[str, Any]:
        """Give it as plain values; options are in the order of their names."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        options = {group: dict(sorted(self.options[group].items())) for group in sorted(self.options)}
        return plain | {"options": options, "tenants": [asdict(tenant) for tenant in self.tenants]}
