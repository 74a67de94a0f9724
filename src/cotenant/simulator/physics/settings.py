"""Options of the simulator itself, in the group `simulator`. All physics is off by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cotenant.core.model.model_name import FAMILIES, Model, model_of
from cotenant.core.model.validation import Violation
from cotenant.core.scheduling.admission import FairShare, Preemption, Rules
from cotenant.core.sizing.restart_cost import RESTART_SECONDS
from cotenant.simulator.physics import bandwidth
from cotenant.simulator.physics.failures import FAILED_PERCENT, KILLED_PERCENT

Speed = Literal["none", "all", "cores", "gpu-type", "locality", "colocation", "bandwidth"]
SPEEDS = frozenset({"cores", "gpu-type", "locality", "colocation", "bandwidth"})
SECONDS_MAX = 1e9


@dataclass(frozen=True, slots=True)
class Settings:
    """The options `--option simulator.…`; `docs/simulator-physics.md` gives the source of each figure.

    cores: request of jobs whose trace has no cores: `none`, or `auto`, so that the allocator decides.
    speed: what decides how fast jobs run: `none`, `all`, or any of cores, gpu-type, locality, colocation, bandwidth.
    isolation: with cores, whether jobs have their cores to themselves: `exclusive`; `none`: all jobs on a node share
      its cores, whatever they hold, and slow each other down; `ideal`: they share them, and crowding costs nothing.
    interference: with colocation, whether gangs on one server slow each other down: `none`, or `philly`.
    model_default: model of jobs whose own is unknown; empty: their speed does not depend on it.
    memory_bandwidth_bytes_per_second: of nodes without a value in the cluster file.
    bandwidth_sensitivity: share of a training step that waits for memory if memory is the bottleneck, 0 to 1.
    contention_interval_seconds: time between two queries of the contention policy.
    contention_hardware: capabilities of nodes: `enforced`, they report each job's memory bandwidth and limit it;
      `told`, they only report it; `none`.
    sample_noise: standard deviation of the rates that a contention policy sees, relative to them.
    rate_noise: standard deviation of a measured rate, relative to it, if the allocator resizes running jobs.
    utilisation: GPU utilization that jobs report: `none`, or `philly`.
    preemption_cost_seconds: work that a job repeats each time it starts again after a preemption, or `model`.
    resize_cost_seconds: time that a restart with another number of replicas takes an elastic job.
    preemption_grace: whether a job may save its work before it is preempted.
    checkpoint_interval_seconds: run time between saves; work after the last save is lost in a failure. None: no saves.
    failures: whether jobs are killed and fail: `none`, or as in `philly`.
    failed_percent: percentage of training jobs that fail, with `philly`.
    killed_percent: percentage of training jobs that are killed, with `philly`.
    retries: which failures are retried: `none`, `transient`, or all, as `philly` did.
    retry_backoff_seconds: wait before the first retry, doubled for each further one, up to 300 s.
    node_mtbf_hours: mean time between failures of a node; None: nodes never fail.
    node_repair_hours: mean time until a node is repaired.
    preemption: which jobs may be stopped for others: `policy`, as the queue policy decides; `priority`, also jobs of
      lower priority for jobs of a higher one; `never`, none.
    run_seconds_min: a job is not stopped for others until it has run this long since its last start.
    reclaim: whether jobs within their tenant's guarantee may stop jobs that borrow from it, if the queue policy itself
      stops none.
    reserve_after_seconds: wait after which a gang gets a reservation that other jobs may not break; None: no
      reservations.
    reservations: maximum number of gangs with a reservation at a time.
    fair_share: `tenants` share the cluster fairly, by weight, and the queue policy orders the jobs of each;
      `throughput`, the same, and a GPU counts by what its type is worth to its job; `off`, the policy alone orders all
      jobs.
    usage_half_life_seconds: time after which past use counts half in fair shares; 0: it does not count.
    """

    cores: Literal["none", "auto"] = "none"
    speed: tuple[Speed, ...] = ("none",)
    isolation: Literal["exclusive", "none", "ideal"] = "exclusive"
    interference: Literal["none", "philly"] = "none"
    model_default: str = ""
    memory_bandwidth_bytes_per_second: float = bandwidth.PEAK_BYTES_PER_SECOND
    bandwidth_sensitivity: float = bandwidth.SENSITIVITY
    contention_interval_seconds: float = 5.0
    contention_hardware: Literal["enforced", "told", "none"] = "enforced"
    sample_noise: float = 0.05
    rate_noise: float = 0.02
    utilisation: Literal["none", "philly"] = "none"
    preemption_cost_seconds: float | Literal["model"] = 0.0
    resize_cost_seconds: float = RESTART_SECONDS
    preemption_grace: bool = True
    checkpoint_interval_seconds: float | None = 1800.0
    failures: Literal["none", "philly"] = "none"
    failed_percent: float = FAILED_PERCENT
    killed_percent: float = KILLED_PERCENT
    retries: Literal["none", "transient", "philly"] = "transient"
    retry_backoff_seconds: float = 1.0
    node_mtbf_hours: float | None = None
    node_repair_hours: float = 1.0
    preemption: Preemption = Preemption.POLICY
    run_seconds_min: float = 0.0
    reclaim: bool = True
    reserve_after_seconds: float | None = None
    reservations: int = 1
    fair_share: FairShare = FairShare.OFF
    usage_half_life_seconds: float = 0.0

    def check(self) -> list[Violation]:
        """Return a violation for each invalid option."""
        return [*self._out_of_range(), *self._contradictions(), *self.rules.check()]

    def _out_of_range(self) -> Iterator[Violation]:
        for name, least, most in (
            ("preemption_cost_seconds", 0.0, SECONDS_MAX),
            ("resize_cost_seconds", 0.0, SECONDS_MAX),
            ("memory_bandwidth_bytes_per_second", 1.0, 1e15),
            ("bandwidth_sensitivity", 0.0, 1.0),
            ("contention_interval_seconds", 0.1, SECONDS_MAX),
            ("rate_noise", 0.0, 1.0),
            ("sample_noise", 0.0, 1.0),
            ("checkpoint_interval_seconds", 0.001, SECONDS_MAX),
            ("failed_percent", 0.0, 100.0),
            ("killed_percent", 0.0, 100.0),
            ("retry_backoff_seconds", 0.0, SECONDS_MAX),
            ("node_mtbf_hours", 0.01, SECONDS_MAX),
            ("node_repair_hours", 0.001, SECONDS_MAX),
        ):
            value = getattr(self, name)
            if isinstance(value, float) and not least <= value <= most:
                range_ = f"from {least:g} to {most:g}" if most < SECONDS_MAX else f"{least:g} or more"
                yield Violation(name, f"must be {range_}, not {value:g}")

    def _contradictions(self) -> Iterator[Violation]:
        if len(self.speed) != 1 and {"none", "all"} & set(self.speed):
            yield Violation("speed", "none and all cannot be combined with other values")
        if self.failed_percent + self.killed_percent > 100:
            yield Violation("killed_percent", "and failed_percent must not exceed 100 together")
        if self.interference != "none" and "colocation" not in self.speeds:
            yield Violation("interference", "needs colocation in speed")
        if self.isolation != "exclusive" and "cores" not in self.speeds:
            yield Violation("isolation", "needs cores in speed")
        if self.model_default and not self.model:
            yield Violation("model_default", f"must be one of {', '.join(FAMILIES)}, not {self.model_default!r}")

    @property
    def rules(self) -> Rules:
        """How far the order is enforced against running jobs."""
        return Rules(
            self.preemption,
            self.run_seconds_min,
            self.reclaim,
            self.reserve_after_seconds,
            self.reservations,
            self.fair_share,
            self.usage_half_life_seconds,
        )

    @property
    def speeds(self) -> frozenset[str]:
        """The speed models that are on."""
        return SPEEDS if self.speed == ("all",) else frozenset(self.speed) - {"none"}

    @property
    def model(self) -> Model | None:
        """The model used for unknown ones."""
        return model_of(self.model_default)
