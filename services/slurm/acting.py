"""What the bridge changes in Slurm, each only where told to: cores at submission, order and nodes of pending jobs.

Acting never stands in Slurm's way: cores are written to a file that slurmctld's script may read or not, and the order
is set with few calls per reading, each bounded. What cannot be done is left, said once, and tried again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from cotenant.core.model.estimate import Estimate
from cotenant.core.policy.protocols import PlacementPolicy, QueuePolicy
from cotenant.rpc.connections import ProcessProblem
from cotenant.services.slurm import planning
from cotenant.services.slurm.cluster_watch import ClusterWatch
from cotenant.services.slurm.commands import SlurmAway, SlurmCommands, SlurmRefused
from cotenant.services.slurm.core_choice import VALID_SECONDS, CoreChoice, RunHistory, TableRules, table_text
from cotenant.services.slurm.node_choice import (
    NodeChoice,
    changes,
    chosen_nodes,
    dump,
    is_ours,
    load,
    without_lists,
)
from cotenant.services.slurm.records import Picture, SlurmJob
from cotenant.services.slurm.site_order import planned_order, site_factors
from cotenant.services.slurm.start_times import StartTimes

log = structlog.get_logger()

CORES, ORDER, NODES = "cores", "order", "nodes"
ACTS = (CORES, ORDER, NODES)
HISTORY_FILE = "slurm-runs.json"
NODES_FILE = "slurm-nodes.json"
HISTORY_BYTES_MAX = 64 * 1024 * 1024
TABLE_SECONDS = VALID_SECONDS / 4  # after which an unchanged table is written again, so that it stays valid
UPDATES_MAX = 25  # SiteFactors set after one reading
UPDATE_SECONDS_MAX = 3.0  # after which no more are begun
WITHDRAW_SECONDS_MAX = 10.0  # at the end; the next start withdraws the others
WEIGHT = 100_000
POLICY = "srsf"
PLACEMENT = "fgd"
FRESH_SECONDS = 30.0
WITHDRAW_SECONDS_MAX = 10.0  # at the end; the next start withdraws the others
SEED = 0
TABLE_MODE = 0o644
LISTED_MAX = 1_000  # lines of a dry run


@dataclass(frozen=True, slots=True)
class ActConfig:
    """What to change in Slurm.

    Args:
        acts: Names of `ACTS`.
        dry_run: Only list what would be changed.
        table: The file of cores that the script in slurmctld reads.
        history: The file with earlier run times.
        cpus_per_gpu_max: The most CPUs for each GPU; None: a GPU's share of its node.
        explicit: Also change jobs whose users named a number of CPUs.
        weight: The largest SiteFactor.
        policy: The queue policy that orders pending jobs.
        lists: The file with the lists of excluded nodes that were set.
        placement: The placement policy that chooses nodes.
        say: Receives each line of a dry run.
    """

    acts: frozenset[str] = frozenset()
    dry_run: bool = False
    table: Path = Path("slurm-cores.table")
    history: Path = Path(HISTORY_FILE)
    cpus_per_gpu_max: int | None = None
    explicit: bool = False
    weight: int = WEIGHT
    policy: str = POLICY
    lists: Path = Path(NODES_FILE)
    placement: str = PLACEMENT
    say: Callable[[str], None] = field(default=lambda line: None)


class CoreTable:
    """Learns cores from runs, and keeps the table that the script in slurmctld reads."""

    def __init__(self, config: ActConfig, history: RunHistory) -> None:
        self.choices: Sequence[CoreChoice] = ()
        self._problems: dict[Path, ProcessProblem] = {}
        self._config, self._history, self._unsaved = config, history, False
        self._written: tuple[Sequence[CoreChoice], TableRules] | None = None
        self._written_seconds = float("-inf")
        self._said: set[str] = set()

    @property
    def problem(self) -> ProcessProblem | None:
        """Why a file could not be written."""
        return next(iter(self._problems.values()), None)

    def ended(self, jobs: Sequence[SlurmJob], picture: Picture) -> None:
        """Learn from jobs that ended."""
        for job in jobs:
            self._unsaved |= self._history.add(job, picture)

    async def renew(self, picture: Picture, configuration: Mapping[str, str], defaults: Mapping[str, int]) -> None:
        """Write the table if it changed or grows old, and save what was learned."""
        self.choices = self._history.choices(picture, self._config.cpus_per_gpu_max, defaults)
        rules = TableRules(self._config.explicit, _memory_follows_cpus(configuration), self._config.dry_run)
        if self._config.dry_run:
            self._say_new()
        if self._unsaved:
            self._unsaved = not await self._write(self._config.history, self._history.dump(), 0o600)
        now = time.time()
        if (self.choices, rules) != self._written or not 0 <= now - self._written_seconds < TABLE_SECONDS:
            text = table_text(self.choices, rules, now)
            if await self._write(self._config.table, text, TABLE_MODE):
                self._written, self._written_seconds = (self.choices, rules), now

    def _say_new(self) -> None:
        for line in map(str, self.choices):
            if line not in self._said and len(self._said) < LISTED_MAX:
                self._said.add(line)
                self._config.say(f"would give {line}")

    async def _write(self, path: Path, text: str, mode: int) -> bool:
        try:
            await asyncio.to_thread(replace_file, path, text, mode)
        except OSError as error:
            what = f"cannot write {path}: {(error.strerror or str(error)).lower()}"
            if path not in self._problems:
                log.warning("slurm_cores_not_written", error=what)
            remedy = "make its folder writable for the bridge, or choose another with --cores-table or --state-dir"
            self._problems[path] = ProcessProblem(what, remedy)
            return False
        self._problems.pop(path, None)
        return True

    async def withdraw(self) -> None:
        """Remove the table: without the bridge, cores are as users ask."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._config.table.unlink)


class PendingOrder:
    """Sets the SiteFactors of pending jobs by the order of a queue policy."""

    def __init__(self, config: ActConfig, history: RunHistory, slurm: SlurmCommands, policy: QueuePolicy) -> None:
        self.problem: ProcessProblem | None = None
        self._config, self._history, self._slurm, self._policy = config, history, slurm, policy
        self._said: dict[str, int] = {}

    async def renew(self, picture: Picture, start_times: StartTimes) -> None:
        """Set factors that differ from the order, those of the first jobs first; not too many at once.

        Raises:
            SlurmAway: Slurm does not answer.
        """
        scene = (await start_times.answers()).scene
        estimates = {**scene.estimates, **self._by_cores(picture)}
        order = await asyncio.to_thread(planned_order, picture, estimates, self._policy, time.time())
        if not order:
            return
        factors = site_factors(order, await self._slurm.site_factors(), self._config.weight)
        if self._config.dry_run:
            self._say(factors)
        else:
            await self._apply(factors)

    def _by_cores(self, picture: Picture) -> dict[str, Estimate]:
        """Return the estimates of jobs whose kind ran before: the predictor knows nothing of other core counts."""
        found = {}
        for job in picture.jobs.values():
            seconds = self._history.expected_seconds(job, picture) if job.waits else None
            if seconds is not None:
                found[job.id] = Estimate(predictable=True, confidence=1.0, remaining_seconds=seconds, source="runs")
        return found

    def _say(self, changes: Mapping[str, int]) -> None:
        new = {job: factor for job, factor in changes.items() if self._said.get(job) != factor}
        for job, factor in list(new.items())[:LISTED_MAX]:
            self._config.say(f"would set: scontrol update JobId={job} SiteFactor={factor}")
        self._said = dict(changes)

    async def _apply(self, changes: Mapping[str, int]) -> None:
        until, done, refused = time.monotonic() + UPDATE_SECONDS_MAX, 0, list[str]()
        for job, factor in list(changes.items())[:UPDATES_MAX]:
            if time.monotonic() > until:
                break
            try:
                await self._slurm.set_site_factor(job, factor)
            except SlurmRefused as error:  # it started or ended in between, or we may not
                refused.append(str(error))
                if error.denied:
                    self.problem = _denied(error)
                    break
            else:
                done += 1
        if done:
            self.problem = None
        if changes:
            log.info("slurm_order_set", jobs=done, refused=len(refused), left=len(changes) - done - len(refused))
        if refused:
            log.info("slurm_order_refused", first=refused[0])


class PendingNodes:
    """Chooses the nodes of pending jobs by lists of excluded nodes, and withdraws each that no longer holds."""

    def __init__(self, config: ActConfig, slurm: SlurmCommands, policy: PlacementPolicy) -> None:
        self.problem: ProcessProblem | None = None
        self._config, self._slurm, self._policy = config, slurm, policy
        self._ours = _loaded_lists(config.lists)
        self._set_at: dict[str, float] = {}
        self._said: dict[str, tuple[str, ...]] = {}

    async def renew(self, picture: Picture, start_times: StartTimes) -> None:
        """Set and withdraw lists, not too many at once.

        Raises:
            SlurmAway: Slurm does not answer.
        """
        fresh = time.monotonic() - FRESH_SECONDS  # a reading may have begun before a list was set
        self._set_at = {job: at for job, at in self._set_at.items() if at > fresh}
        self._ours = {
            job: nodes
            for job, nodes in self._ours.items()
            if job in self._set_at or is_ours(picture.jobs.get(job), nodes)
        }
        estimates = (await start_times.answers()).scene.estimates

        def plan() -> dict[str, NodeChoice]:
            scene = planning.scene_of(without_lists(picture, self._ours), time.time(), estimates)
            return chosen_nodes(scene, self._policy, np.random.default_rng(SEED))

        wanted = await asyncio.to_thread(plan)
        if self._config.dry_run:
            self._say(wanted)
        else:
            await self._apply(changes(picture, self._ours, wanted))

    def _say(self, wanted: Mapping[str, NodeChoice]) -> None:
        lists = {job: one.excluded for job, one in wanted.items()}
        for job, nodes in list(lists.items())[:LISTED_MAX]:
            if self._said.get(job) != nodes:
                self._config.say(f"would set: scontrol update JobId={job} ExcNodeList={','.join(nodes)}")
        self._said = lists

    async def _apply(self, lists: Mapping[str, tuple[str, ...]]) -> None:
        until, refused = time.monotonic() + UPDATE_SECONDS_MAX, list[str]()
        now = dict(list(lists.items())[:UPDATES_MAX])
        if not now:
            return
        # What may be set is noted first: a bridge that is killed in between finds it again.
        if not await self._note(self._ours | {job: nodes for job, nodes in now.items() if nodes}):
            return
        for job, nodes in now.items():
            if time.monotonic() > until:
                break
            try:
                await self._slurm.exclude_nodes(job, nodes)
            except SlurmRefused as error:  # it started or ended in between, or we may not
                refused.append(str(error))
                if error.denied:
                    self.problem = _denied(error)
                    break
            else:
                self.problem = None
                self._ours.pop(job, None)
                if nodes:
                    self._ours[job], self._set_at[job] = nodes, time.monotonic()
        await self._note(self._ours)
        log.info("slurm_nodes_set", jobs=len(now) - len(refused), refused=len(refused), first=" ".join(refused[:1]))

    async def _note(self, lists: Mapping[str, tuple[str, ...]]) -> bool:
        try:
            await asyncio.to_thread(replace_file, self._config.lists, dump(lists), 0o600)
        except OSError as error:
            what = f"cannot write {self._config.lists}: {(error.strerror or str(error)).lower()}"
            self.problem = ProcessProblem(what, "make its folder writable for the bridge")
            return False
        return True

    async def withdraw(self) -> None:
        """Remove all lists of ours from jobs that still wait: without the bridge, Slurm chooses alone."""
        until = time.monotonic() + WITHDRAW_SECONDS_MAX
        for job in list(self._ours) if not self._config.dry_run else ():
            if time.monotonic() > until:
                break
            with contextlib.suppress(SlurmAway, SlurmRefused):
                await self._slurm.exclude_nodes(job, ())
                del self._ours[job]
        if not self._config.dry_run and self._config.lists.exists():
            await self._note(self._ours)


class Acting:
    """The acts that are switched on, after each reading of Slurm."""

    def __init__(
        self,
        config: ActConfig,
        slurm: SlurmCommands,
        watch: ClusterWatch,
        start_times: StartTimes,
        policies: tuple[QueuePolicy, PlacementPolicy],
    ) -> None:
        self._slurm, self._watch, self._start_times = slurm, watch, start_times
        self._configuration: Mapping[str, str] = {}
        self._defaults: Mapping[str, int] = {}
        self._read_seconds = float("-inf")
        history = _loaded(config.history) if CORES in config.acts else RunHistory()
        self.cores = CoreTable(config, history) if CORES in config.acts else None
        self.order = PendingOrder(config, history, slurm, policies[0]) if ORDER in config.acts else None
        self.nodes = PendingNodes(config, slurm, policies[1]) if NODES in config.acts else None

    def ended(self, jobs: Sequence[SlurmJob], picture: Picture) -> None:
        """Learn from jobs that ended."""
        if self.cores:
            self.cores.ended(jobs, picture)

    async def renew(self) -> None:
        """Act on the last picture, unless it is an old one: Slurm is then left alone."""
        if self._watch.problem or not (self.cores or self.order or self.nodes):
            return
        try:
            await self._read_configuration()
            if self.cores:
                await self.cores.renew(self._watch.picture, self._configuration, self._defaults)
            if self.order:
                await self.order.renew(self._watch.picture, self._start_times)
            if self.nodes:
                await self.nodes.renew(self._watch.picture, self._start_times)
        except SlurmAway as error:
            log.info("slurm_acts_delayed", error=str(error))

    async def _read_configuration(self) -> None:
        if time.monotonic() - self._read_seconds < VALID_SECONDS and self._configuration:
            return
        self._configuration = await self._slurm.configuration()
        self._defaults = default_cpus_per_gpu(await self._slurm.partitions()) if self.cores else {}
        self._read_seconds = time.monotonic()

    def problems(self) -> Sequence[ProcessProblem]:
        """Return why an act that is switched on has no effect."""
        found = [act.problem for act in (self.cores, self.order, self.nodes) if act and act.problem]
        if not self._configuration:
            return found
        plugins = self._configuration.get("JobSubmitPlugins", "").split(",")
        if self.cores and "lua" not in (one.removeprefix("job_submit/").strip() for one in plugins):
            remedy = "set JobSubmitPlugins=lua in slurm.conf, with the script of `cotenant slurm-bridge lua`"
            found.append(ProcessProblem("--act cores has no effect: Slurm has no lua plug-in for submissions", remedy))
        if self.order and "multifactor" not in self._configuration.get("PriorityType", "multifactor"):
            remedy = "set PriorityType=priority/multifactor in slurm.conf"
            found.append(ProcessProblem("--act order has no effect: Slurm's priorities have no factors", remedy))
        return found

    async def close(self) -> None:
        """Withdraw the table of cores and the lists of excluded nodes."""
        if self.cores:
            await self.cores.withdraw()
        if self.nodes:
            await self.nodes.withdraw()


def _denied(error: SlurmRefused) -> ProcessProblem:
    return ProcessProblem(str(error), "run the bridge as SlurmUser or as an operator of Slurm")


def replace_file(path: Path, text: str, mode: int) -> None:
    """Write a file so that a reader finds the old text or the new one, never a part.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _loaded(path: Path) -> RunHistory:
    """Return what was learned before; nothing if there is no file, or one that cannot be read."""
    try:
        with path.open("rb") as file:
            return RunHistory.load(file.read(HISTORY_BYTES_MAX))
    except FileNotFoundError:
        return RunHistory()
    except (OSError, ValueError) as error:
        log.warning("slurm_runs_forgotten", path=str(path), error=str(error))
        return RunHistory()


def _loaded_lists(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the lists that an earlier bridge set; none if there is no file, or one that cannot be read."""
    try:
        with path.open("rb") as file:
            return load(file.read(HISTORY_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("slurm_lists_forgotten", path=str(path), error=str(error))
        return {}


def _memory_follows_cpus(configuration: Mapping[str, str]) -> bool:
    """Return whether Slurm gives jobs that name no memory some for each CPU."""
    return configuration.get("DefMemPerCPU", "UNLIMITED").upper() not in ("UNLIMITED", "0", "")


def default_cpus_per_gpu(text: str) -> dict[str, int]:
    """Return DefCpuPerGPU by partition, from the lines of `scontrol --oneliner show partition`.

    >>> default_cpus_per_gpu("PartitionName=main JobDefaults=DefCpuPerGPU=4,DefMemPerGPU=100 State=UP")
    {'main': 4}
    """
    found = {}
    for line in text.splitlines():
        name = re.search(r"(?:^|\s)PartitionName=(\S{1,200})", line)
        default = re.search(r"DefCpuPerGPU=(\d{1,5})\b", line)
        if name and default:
            found[name[1]] = int(default[1])
    return found
