"""What the bridge to Slurm may change: the options of `serve slurm`, and the script for slurmctld."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.mesh.slurm_node import CPUSETS, node
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.units import parse_seconds

if TYPE_CHECKING:
    from cotenant.services.slurm.acting import ActConfig
    from cotenant.services.slurm.output_progress import ProgressPatterns

TABLE_FILE = "slurm-cores.table"
INTERVAL_SECONDS_MIN = 0.5
CPUS_MAX = 4096
WEIGHT_MAX = 2**30  # Slurm adds it to a priority of 32 bits


def register(app: typer.Typer) -> None:
    """Add the command with its subcommand."""
    group = typer.Typer(no_args_is_help=True, help=slurm_bridge.__doc__)
    group.callback()(slurm_bridge)
    group.command("lua")(lua)
    group.command("node")(node)
    app.add_typer(group, name="slurm-bridge")


def slurm_bridge() -> None:
    """Prepare Slurm for what `cotenant serve slurm --act …` changes, and act on its nodes.

    \b
    Examples:
      cotenant slurm-bridge lua --table /var/lib/cotenant/slurm-cores.table > /etc/slurm/job_submit.lua
      cotenant slurm-bridge node --act cpusets --dry-run
    """


def lua(
    table: Annotated[
        Path, typer.Option(metavar="FILE", help="The same as --cores-table of `serve slurm`, as slurmctld finds it.")
    ],
) -> None:
    """Print the script by which slurmctld gives GPU jobs the cores that they need.

    It reads the table that `cotenant serve slurm --act cores` writes. Without a table, or with one that is damaged or
    older than ten minutes, it changes nothing. Set JobSubmitPlugins=lua in slurm.conf; beside a script of your own, see
    docs/slurm-bridge.md.

    \b
    Example:
      cotenant slurm-bridge lua --table /var/lib/cotenant/slurm-cores.table > /etc/slurm/job_submit.lua
    """
    print(script(table), end="")


def script(table: Path) -> str:
    """Return the script for slurmctld.

    Raises:
        CommandError: the path of the table cannot stand in it.
    """
    from importlib.resources import files

    path = str(table)
    if not table.is_absolute() or not path.isprintable() or set(path) & set('"\\\\'):
        raise usage_error(f"--table must be an absolute path without quotes and backslashes, not {path!r}")
    return (files("cotenant.services.slurm") / "job_submit.lua").read_text().replace("@TABLE@", path)


@dataclass(frozen=True, slots=True)
class ActOptions:
    """The options of `serve slurm` about what it changes, as given."""

    acts: Sequence[str] = ()
    dry_run: bool = False
    table: Path | None = None
    cpus_per_gpu: int | None = None
    override: bool = False
    order_by: str = ""
    weight: int | None = None
    interval: str = ""
    nodes_by: str = ""
    progress: Sequence[str] = ()

    def given(self) -> list[str]:
        """Return the flags that were given."""
        flags = {
            "--act": self.acts,
            "--dry-run": self.dry_run,
            "--cores-table": self.table,
            "--cpus-per-gpu": self.cpus_per_gpu is not None,
            "--override-cpus": self.override,
            "--order-by": self.order_by,
            "--order-weight": self.weight is not None,
            "--interval": self.interval,
            "--nodes-by": self.nodes_by,
            "--progress-regex": self.progress,
        }
        return [flag for flag, value in flags.items() if value]


def read_acts(options: ActOptions, state_dir: Path) -> tuple[ActConfig, float]:
    """Return what the bridge changes, and its interval in seconds.

    Raises:
        CommandError: names every invalid option.
    """
    from cotenant.services.slurm import acting
    from cotenant.services.slurm.cluster_watch import INTERVAL_SECONDS

    wrong, interval_seconds = [*_misused(options, acting.ACTS)], INTERVAL_SECONDS
    if options.interval:
        try:
            interval_seconds = parse_seconds(options.interval)
        except ValueError as error:
            wrong.append(f"--interval {error}")
        if interval_seconds < INTERVAL_SECONDS_MIN:
            wrong.append(f"--interval must be {INTERVAL_SECONDS_MIN:g} s or more, not {options.interval}")
    if wrong:
        raise usage_error("; ".join(wrong))
    config = acting.ActConfig(
        acts=frozenset(options.acts),
        dry_run=options.dry_run,
        table=(options.table or state_dir / TABLE_FILE).absolute(),
        cpus_per_gpu_max=options.cpus_per_gpu,
        explicit=options.override,
        weight=options.weight or acting.WEIGHT,
        policy=options.order_by or acting.POLICY,
        placement=options.nodes_by or acting.PLACEMENT,
        say=note,
    )
    return config, interval_seconds


def read_patterns(texts: Sequence[str]) -> ProgressPatterns | None:
    """Return the patterns by which jobs' output is read; None if it is not.

    Raises:
        CommandError: one is invalid, or has no group for the step.
    """
    from cotenant.core.model.patterns import HINT, BadPattern, compile_pattern
    from cotenant.services.slurm.output_progress import DEFAULT, ProgressPatterns

    if not texts:
        return None
    for text in texts:
        try:
            if text != DEFAULT and compile_pattern(text).groups < 1:
                raise usage_error(f"--progress-regex {text!r} has no group for the step", hint=r"such as 'step (\d+)'")
        except BadPattern as error:
            raise usage_error(f"--progress-regex {text!r}: {error}", hint=HINT) from None
    return ProgressPatterns(texts)


def _misused(options: ActOptions, acts: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the options, without the interval."""
    for name in options.acts:
        if name == CPUSETS:
            yield f"--act {CPUSETS} is for the nodes: run `cotenant slurm-bridge node --act {CPUSETS}` on each"
        elif name not in acts:
            yield f"--act must be {', '.join(acts[:-1])} or {acts[-1]}, not {name!r}"
    flags: dict[str, dict[str, object]] = {
        "cores": {
            "--cores-table": options.table,
            "--cpus-per-gpu": options.cpus_per_gpu,
            "--override-cpus": options.override,
        },
        "order": {"--order-by": options.order_by, "--order-weight": options.weight},
        "nodes": {"--nodes-by": options.nodes_by},
    }
    for act, values in flags.items():
        unused = [flag for flag, value in values.items() if value not in (None, False, "")]
        if unused and act not in options.acts:
            yield f"{' and '.join(unused)} must be used with --act {act}"
    if options.dry_run and not options.acts:
        yield f"--dry-run must be used with --act {' or --act '.join(acts)}"
    if options.cpus_per_gpu is not None and not 1 <= options.cpus_per_gpu <= CPUS_MAX:
        yield f"--cpus-per-gpu must be between 1 and {CPUS_MAX}, not {options.cpus_per_gpu}"
    if options.weight is not None and not 1 <= options.weight <= WEIGHT_MAX:
        yield f"--order-weight must be between 1 and {WEIGHT_MAX}, not {options.weight}"
