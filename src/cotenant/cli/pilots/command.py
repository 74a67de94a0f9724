"""`cotenant pilots slurm`: keeps as many agents in jobs of Slurm as the waiting jobs ask for."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, access_of, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.name_lookup import all_jobs, all_nodes
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.cli.pilots.job_script import job_script
from cotenant.cli.pilots.plan import MORE_NODES_MAY_HELP, Limits, Pilot, Size, WaitingJob, make_plan, pilots_needed
from cotenant.cli.pilots.slurm_commands import Slurm, SlurmRefused
from cotenant.cli.slurm.times import write_period
from cotenant.cli.units import parse_bytes, parse_seconds
from cotenant.rpc.access import Access, AccessError
from cotenant.v1.job_pb2 import JOB_PHASE_QUEUED, Job
from cotenant.v1.job_service_pb2 import JobFilter
from cotenant.v1.node_service_pb2 import NODE_STATE_AWAY, NODE_STATE_LOST, ForgetNodeRequest, Node

if TYPE_CHECKING:
    from collections.abc import Sequence

POOL = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
GRES_GPUS = re.compile(r"(?:gres/)?gpu(?::[A-Za-z][A-Za-z0-9_.-]*)?(?::([0-9]{1,4}))?")
BACK_OFF_SECONDS, BACK_OFF_SECONDS_MAX = 10.0, 300.0
GONE = (NODE_STATE_AWAY, NODE_STATE_LOST)
NAMED_MAX = 4  # jobs that fit into no pilot


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(no_args_is_help=True, help=pilots.__doc__)
    group.callback()(pilots)
    group.command("slurm")(slurm)
    app.add_typer(group, name="pilots")


def pilots() -> None:
    """Run agents in the jobs of another system, as many as the waiting jobs ask for.

    \b
    Example:
      cotenant pilots slurm --max 4 --time 8h --gres gpu:4 --cpus 32
    """


@dataclass(frozen=True, slots=True)
class Offer:
    """What is submitted: the shape of a pilot, and the options and the script of its job."""

    name: str
    shape: Size
    limits: Limits
    sbatch: tuple[str, ...]
    script: str


@dataclass(slots=True)
class Keeper:
    """Keeps the pilots of one name; what it knows beyond Slurm and the mesh only spares repeated words and tries."""

    offer: Offer
    slurm: Slurm
    flags: Flags
    as_json: bool = False
    dry_run: bool = False
    _said: dict[str, int] = field(default_factory=dict)
    _refusals: int = 0
    _not_before: float = 0.0
    _complaints: dict[str, str] = field(default_factory=dict)

    def look(self) -> bool:
        """Look once and do what is to be done; return whether Slurm and the mesh answered."""
        try:
            known = self.slurm.pilots()
            jobs, nodes = with_mesh(self.flags, self._read)
        except SlurmRefused as error:
            self._complain("slurm", f"Slurm does not answer, waiting for it: {error}")
            return False
        except CommandError as error:
            if error.code is not ExitCode.UNREACHABLE:
                raise
            self._complain("mesh", f"the mesh does not answer, waiting for it: {error.message}")
            return False
        for what in ("slurm", "mesh"):
            self._complaints.pop(what, None)
        serving = {pilot for pilot, node in nodes.items() if node.state not in GONE}
        known = [replace(pilot, serving=pilot.id in serving) for pilot in known]
        needed, too_large = pilots_needed(jobs, self.offer.shape, self.offer.limits.most)
        self._describe(known, len(jobs), needed)
        for job in too_large[:NAMED_MAX]:
            self._complain(job, f"job {job} has a replica that does not fit into a pilot")
        plan = make_plan(known, needed, self.offer.limits)
        self._submit(plan.submit)
        self._cancel(plan.cancel)
        live = {pilot.id for pilot in known}
        for pilot, node in sorted(nodes.items()):
            if pilot not in live and node.state in GONE:
                self._forget(pilot, node.id)
        return True

    def _describe(self, known: Sequence[Pilot], waiting: int, needed: int) -> None:
        """Print the numbers of jobs and pilots, if they have changed."""
        counts = {
            "waiting": waiting,
            "needed": needed,
            "serving": sum(pilot.serving for pilot in known),
            "pending": sum(pilot.pending for pilot in known),
            "pilots": len(known),
        }
        if counts != self._said:
            self._said = counts
            self._tell(
                "waiting jobs: {waiting}, for which pilots are needed: {needed}; pilots: {pilots}, of which serving: "
                "{serving}, pending: {pending}".format_map(counts),
                **counts,
            )

    async def _read(self, mesh: Mesh) -> tuple[list[WaitingJob], dict[str, Node]]:
        """Return the jobs that wait for room, and the nodes of pilots by the pilots' ids."""
        queued = JobFilter(phases=[JOB_PHASE_QUEUED])
        jobs = [_waiting(job) async for job in all_jobs(mesh, queued) if job.refusal.code in MORE_NODES_MAY_HELP]
        prefix = f"{self.offer.name}-"
        nodes = {node.id.removeprefix(prefix): node async for node in all_nodes(mesh) if node.id.startswith(prefix)}
        return jobs, {pilot: node for pilot, node in nodes.items() if pilot.isdigit()}

    def _submit(self, count: int) -> None:
        if not count or time.monotonic() < self._not_before:
            return
        if self.dry_run:
            self._tell(f"would submit {count} pilots: sbatch {' '.join(self.offer.sbatch)}", would_submit=count)
            return
        for _ in range(count):
            try:
                pilot = self.slurm.submit(self.offer.sbatch, self.offer.script)
            except SlurmRefused as error:
                pause = min(BACK_OFF_SECONDS_MAX, BACK_OFF_SECONDS * 2**self._refusals)
                self._refusals = min(self._refusals + 1, 16)
                self._not_before = time.monotonic() + pause
                self._tell(f"Slurm refuses a pilot; the next try is in {pause:g} s: {error}", refused=str(error))
                return
            self._refusals = 0
            self._tell(f"submitted pilot {pilot}", submitted=pilot)

    def _cancel(self, pending: Sequence[str]) -> None:
        if not pending:
            return
        if not self.dry_run:
            try:
                self.slurm.cancel(pending)
            except SlurmRefused as error:
                self._complain("cancel", str(error))
                return
        words = "would cancel" if self.dry_run else "cancelled"
        self._tell(f"{words} pending pilots, which no job waits for: {', '.join(pending)}", cancelled=list(pending))

    def _forget(self, pilot: str, node: str) -> None:
        """Remove the node of a pilot that ended without a goodbye, so that its jobs start elsewhere at once."""
        request = ForgetNodeRequest(id=node, reason=f"Slurm job {pilot} has ended", powered_off=True)
        try:
            if self.dry_run or not self.slurm.has_ended(pilot):
                return
            with_mesh(self.flags, lambda mesh: mesh.nodes.ForgetNode(request))
        except (SlurmRefused, CommandError) as error:
            self._complain(node, f"cannot remove node {node}: {error}")
        else:
            self._tell(f"removed node {node}: its pilot ended without a goodbye", removed=node)

    def _complain(self, about: str, text: str) -> None:
        """Print a problem, unless it was the last one printed."""
        if self._complaints.get(about) != text:
            self._complaints[about] = text
            self._tell(text, problem=text)

    def _tell(self, text: str, **values: Any) -> None:
        if self.as_json:
            print(json.dumps(values), flush=True)
        else:
            print(text, flush=True)


def slurm(
    context: typer.Context,
    time_limit: Annotated[str, typer.Option("--time", metavar="TIME", help="Time limit of a pilot, such as 8h.")],
    most: Annotated[
        int, typer.Option("--max", "--nodes", metavar="N", min=1, help="Most pilots at a time, on a node each.")
    ],
    least: Annotated[int, typer.Option("--min", metavar="N", min=0, help="Fewest pilots, also without demand.")] = 0,
    gres: Annotated[str, typer.Option(metavar="gpu:N", help="Generic resources of a pilot, as for sbatch.")] = "",
    cpus: Annotated[int, typer.Option(metavar="N", min=1, help="CPUs of a pilot.")] = 1,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of a pilot; default: what Slurm gives.")] = "",
    partition: Annotated[str, typer.Option(metavar="NAME", help="Slurm partition; default: Slurm's.")] = "",
    idle: Annotated[str, typer.Option(metavar="TIME", help="A pilot ends when it was idle for this long.")] = "10m",
    drain_before: Annotated[
        str, typer.Option(metavar="TIME", help="How long before its time limit a pilot is drained.")
    ] = "5m",
    sbatch_option: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Further option for sbatch; repeatable.")
    ] = None,
    agent_option: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Further option for `serve agent`; repeatable.")
    ] = None,
    endpoints: Annotated[
        str, typer.Option(metavar="…", help="The mesh's addresses as pilots reach it; default: as this command does.")
    ] = "",
    pool: Annotated[str, typer.Option(metavar="NAME", help="Name of these pilots among others.")] = "pilot",
    every: Annotated[str, typer.Option(metavar="TIME", help="How often to look.")] = "10s",
    once: Annotated[bool, typer.Option("--once", help="Look once and exit, as from cron.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, once.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Keep as many pilots as the waiting jobs ask for: jobs of Slurm that each run one agent on one node.

    A pilot offers what Slurm gave it, and is drained before its time limit. It ends by itself when it was idle for
    long; pending pilots are cancelled when no job waits for them. All state is in Slurm, under the jobs' name: this
    command may be stopped and started again, and pilots run on. See docs/pilots.md.

    \b
    Examples:
      cotenant pilots slurm --max 4 --time 8h --gres gpu:4 --cpus 32
      cotenant pilots slurm --min 1 --max 8 --time 1d --gres gpu:a100:8 --cpus 64 --partition gpu --idle 30m
      cotenant pilots slurm --max 4 --time 8h --gres gpu:4 --sbatch-option=--account=lab --once
      cotenant pilots slurm --max 4 --time 8h --gres gpu:4 --dry-run
    """
    flags = Flags.of(context)
    found = _access(flags)
    reached = endpoints or _addresses(found)
    times = {"time": time_limit, "idle": idle, "drain-before": drain_before, "every": every}
    wrong = [f"--min {least} is above --max {most}"] if least > most else []
    wrong += [] if POOL.fullmatch(pool) else [f"--pool must be of a-z, 0-9 and -, at most 40, not {pool!r}"]
    seconds, shape = _seconds(times, wrong), _shape(gres, cpus, memory, wrong)
    if wrong:
        raise usage_error("invalid options", details=wrong)
    name = f"cotenant-{pool}"
    agent = [
        *(str(Path(sys.executable).with_name("cotenant")), "serve", "agent", "--nested", "--endpoints", reached),
        *("--drain-before", drain_before, "--idle", idle, *(agent_option or ())),
    ]
    sbatch = [
        *("--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", f"--time={write_period(seconds['time'])}"),
        *("--no-requeue", "--export=ALL", f"--comment=pilot of Cotenant at {reached}"),
        *([f"--gres={gres}"] if gres else ()),
        *([f"--mem={max(1, parse_bytes(memory) >> 20)}M"] if memory else ()),
        *([f"--partition={partition}"] if partition else ()),
        *(sbatch_option or ()),
    ]
    if any(host in reached for host in ("127.0.0.1", "localhost", "[::1]")):
        note(f"pilots on other machines cannot reach {reached}: use --endpoints")
    offer = Offer(name, shape, Limits(least, most), tuple(sbatch), job_script(name, agent))
    keeper = Keeper(offer, Slurm(name, {"COTENANT_TOKEN": found.token} if found.token else {}), flags, as_json, dry_run)
    while True:
        answered = keeper.look()
        if once or dry_run:
            raise typer.Exit(0 if answered else ExitCode.UNREACHABLE)
        time.sleep(seconds["every"])


def _access(flags: Flags) -> Access:
    try:
        return access_of(flags)
    except AccessError as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None


def _addresses(found: Access) -> str:
    """Return the addresses of the mesh as an option: one if all services have the same."""
    addresses = {name: address for name, address in found.endpoints._asdict().items() if address}
    single = len(set(addresses.values())) == 1
    return next(iter(addresses.values())) if single else ",".join("=".join(pair) for pair in addresses.items())


def _seconds(texts: dict[str, str], wrong: list[str]) -> dict[str, float]:
    """Return the durations that options give; add what is invalid to `wrong`."""
    found = {}
    for name, text in texts.items():
        try:
            found[name] = parse_seconds(text)
            if not found[name]:
                wrong.append(f"--{name} must be above 0")
        except ValueError as error:
            wrong.append(f"--{name} {error}")
    return found


def _shape(gres: str, cpus: int, memory: str, wrong: list[str]) -> Size:
    """Return the room of a pilot; without a known bound, memory does not count. Add what is invalid to `wrong`.

    >>> _shape("gpu:a100:4", 8, "1GiB", [])
    Size(gpu_milli=4000, cores=8, memory_bytes=1073741824)
    """
    matches = [GRES_GPUS.fullmatch(part.strip()) for part in gres.split(",")]
    gpus = sum(int(match[1] or 1) for match in matches if match)
    memory_bytes = sys.maxsize
    try:
        memory_bytes = parse_bytes(memory) if memory else memory_bytes
    except ValueError as error:
        wrong.append(f"--memory {error}")
    return Size(gpus * 1000, cpus, memory_bytes)


def _waiting(job: Job) -> WaitingJob:
    """Return a waiting job with the sizes of its replicas: the fewest, if their number is open."""
    replicas = [
        Size(role.resources.gpu_milli, max(1, role.resources.cores), role.resources.memory_bytes)
        for role in job.spec.roles
        for _ in range(max(1, role.replicas))
    ]
    return WaitingJob(job.id, tuple(replicas))
